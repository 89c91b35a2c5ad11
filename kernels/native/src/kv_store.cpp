#include "kv_store.h"

#include "attention_blocks.h"
#include "simd.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {
namespace {

void store_head(const Arena& arena, uint8_t* target, const float* values) {
  if (arena.kv_dtype == Dtype::fp32) {
    __builtin_memcpy(target, values, sizeof(float) * static_cast<size_t>(arena.head_dim));
    return;
  }
  uint16_t* bits = reinterpret_cast<uint16_t*>(target);
  for (int d = 0; d < arena.head_dim; d += LANES) store_bf16(bits + d, load(values + d));
}

}  // namespace

void store_kv(Team& team, const Step& step, const Arena& arena, int32_t layer, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride) {
  const Range range = team.share(step.num_tokens);
  int sequence = 0;
  for (int64_t t = range.begin; t < range.end; ++t) {
    while (step.query_start[sequence + 1] <= t) ++sequence;
    const int32_t position = step.positions[t];
    const int32_t slot = position % arena.block_tokens;
    for (int head = 0; head < arena.num_kv_heads; ++head) {
      const HeadBlocks blocks(step, arena, sequence, layer, head);
      const int64_t offset = slot * blocks.row_bytes;
      store_head(arena, blocks.k_of(position / arena.block_tokens) + offset, k + t * k_stride + head * arena.head_dim);
      store_head(arena, blocks.v_of(position / arena.block_tokens) + offset, v + t * v_stride + head * arena.head_dim);
    }
  }
}

}  // namespace remora::REMORA_LEVEL
