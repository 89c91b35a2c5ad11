// Where K and V of one head of one sequence lie in the arena. The only native code that knows the layout of a block
// (its Python counterpart is kernels/layout.py).
#pragma once
#include "remora.h"

namespace remora::REMORA_LEVEL {

// K or V of one layer and head, in every block of the arena.
struct HeadSide {
  HeadSide(const Arena& arena, Dtype side_dtype, int64_t offset)
      : dtype(side_dtype),
        row_bytes(kv_row_bytes(side_dtype, arena.head_dim)),
        num_scales(kv_scales(side_dtype, arena.head_dim)),
        rows(arena.data + offset),
        scales(rows + row_bytes * arena.block_tokens) {}

  Dtype dtype;
  int64_t row_bytes, num_scales;
  uint8_t *rows, *scales;  // of block 0
};

inline HeadSide k_side(const Arena& arena, int32_t layer, int32_t kv_head) {
  return {arena, arena.k_dtype, kv_layer_bytes(arena) * layer + kv_head_bytes(arena, arena.k_dtype) * kv_head};
}
inline HeadSide v_side(const Arena& arena, int32_t layer, int32_t kv_head) {
  return {arena, arena.v_dtype,
          kv_layer_bytes(arena) * layer + kv_head_bytes(arena, arena.k_dtype) * arena.num_kv_heads +
              kv_head_bytes(arena, arena.v_dtype) * kv_head};
}

struct HeadBlocks {
  HeadBlocks(const Step& step, const Arena& arena, int32_t sequence, int32_t layer, int32_t kv_head)
      : table(step.block_table + static_cast<int64_t>(sequence) * step.table_stride),
        block_bytes(arena.block_bytes),
        k(k_side(arena, layer, kv_head)),
        v(v_side(arena, layer, kv_head)) {}

  // The head's rows [block_tokens][row_bytes] in the block of a column of the sequence's table, and their scales
  // [block_tokens][num_scales].
  uint8_t* k_of(int64_t column) const { return k.rows + table[column] * block_bytes; }
  uint8_t* v_of(int64_t column) const { return v.rows + table[column] * block_bytes; }
  uint16_t* scales_of(const HeadSide& side, int64_t column) const {
    return reinterpret_cast<uint16_t*>(side.scales + table[column] * block_bytes);
  }

  const int32_t* table;
  int64_t block_bytes;
  HeadSide k, v;
};

}  // namespace remora::REMORA_LEVEL
