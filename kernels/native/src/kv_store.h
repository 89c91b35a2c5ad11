// Stores a step's K and V into their blocks.
#pragma once
#include "remora.h"

namespace remora::REMORA_LEVEL {

// Row t of `k` (already normed and rotated) and of `v`, each [num_tokens][stride] fp32 with the kv heads side by side,
// goes to its sequence's slot for positions[t], rounded to arena.kv_dtype (fp32 or bf16) to nearest even.
// Each rank stores its share of the tokens: barrier before attention reads them.
void store_kv(Team& team, const Step& step, const Arena& arena, int32_t layer, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride);

}  // namespace remora::REMORA_LEVEL
