// Stores a step's K and V into their blocks, and writes blocks anew in another precision.
#pragma once
#include "remora.h"

namespace remora::REMORA_LEVEL {

constexpr int MAX_KV_HEAD_DIM = 256;

// Row t of `k` (already normed and rotated) and of `v`, each [num_tokens][stride] fp32 with the kv heads side by side,
// goes to its sequence's slot for positions[t], rounded to nearest even or quantised to the arena's precisions.
// A sequence with a value that is not finite, or would not be, is marked in step.not_finite.
// Each rank stores its share of the tokens: barrier before attention reads them.
void store_kv(Team& team, const Step& step, const Arena& arena, int32_t layer, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride);

// Block sources[i] of `from` becomes block targets[i] of `to`, which differs in nothing but precision and whose bytes
// are others'. Each rank writes its share.
void reencode_blocks(Team& team, const Arena& from, const Arena& to, const int32_t* sources, const int32_t* targets,
                     int64_t count);

}  // namespace remora::REMORA_LEVEL
