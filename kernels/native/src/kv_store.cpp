#include "kv_store.h"

#include "attention_blocks.h"
#include "quantise.h"
#include "simd.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {
namespace {

// Values of one token and head to their slot.
bool store_row(const HeadBlocks& blocks, const HeadSide& side, int64_t column, int32_t slot, const float* values,
               int head_dim) {
  uint8_t* row = side.rows + blocks.table[column] * blocks.block_bytes + slot * side.row_bytes;
  return encode_kv_row(side.dtype, values, head_dim, row, blocks.scales_of(side, column) + slot * side.num_scales);
}

}  // namespace

void store_kv(Team& team, const Step& step, const Arena& arena, int32_t layer, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride) {
  const Range range = team.share(step.num_tokens);
  int sequence = 0;
  for (int64_t t = range.begin; t < range.end; ++t) {
    while (step.query_start[sequence + 1] <= t) ++sequence;
    const int32_t column = step.positions[t] / arena.block_tokens, slot = step.positions[t] % arena.block_tokens;
    bool fits = true;
    for (int head = 0; head < arena.num_kv_heads; ++head) {
      const HeadBlocks blocks(step, arena, sequence, layer, head);
      const int64_t offset = head * arena.head_dim;
      fits &= store_row(blocks, blocks.k, column, slot, k + t * k_stride + offset, arena.head_dim);
      fits &= store_row(blocks, blocks.v, column, slot, v + t * v_stride + offset, arena.head_dim);
    }
    // Ranks may write the same byte: all of them write a 1.
    if (!fits && step.not_finite != nullptr) __atomic_store_n(step.not_finite + sequence, 1, __ATOMIC_RELAXED);
  }
}

void reencode_blocks(Team& team, const Arena& from, const Arena& to, const int32_t* sources, const int32_t* targets,
                     int64_t count) {
  float values[MAX_KV_HEAD_DIM];
  const auto reencode = [&](HeadSide source, HeadSide target, int64_t block) {
    const uint8_t* row = source.rows + sources[block] * from.block_bytes;
    const uint8_t* scales = source.scales + sources[block] * from.block_bytes;
    uint8_t* out = target.rows + targets[block] * to.block_bytes;
    uint8_t* out_scales = target.scales + targets[block] * to.block_bytes;
    if (source.dtype == target.dtype) {
      __builtin_memcpy(out, row, static_cast<size_t>(kv_head_bytes(from, source.dtype)));
      return;
    }
    for (int32_t token = 0; token < from.block_tokens; ++token) {
      decode_kv_row(source.dtype, row + token * source.row_bytes,
                    reinterpret_cast<const uint16_t*>(scales) + token * source.num_scales, from.head_dim, values);
      encode_kv_row(target.dtype, values, from.head_dim, out + token * target.row_bytes,
                    reinterpret_cast<uint16_t*>(out_scales) + token * target.num_scales);
    }
  };
  const Range range = team.share(count * from.num_layers);
  for (int64_t item = range.begin; item < range.end; ++item) {
    const int64_t block = item / from.num_layers;
    const auto layer = static_cast<int32_t>(item % from.num_layers);
    for (int32_t head = 0; head < from.num_kv_heads; ++head) {
      reencode(k_side(from, layer, head), k_side(to, layer, head), block);
      reencode(v_side(from, layer, head), v_side(to, layer, head), block);
    }
  }
}

}  // namespace remora::REMORA_LEVEL
