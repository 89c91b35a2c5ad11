// Where K and V of one head of one sequence lie in the arena. The only native code that knows the layout of a block
// (its Python counterpart is kernels/layout.py).
#pragma once
#include "remora.h"

namespace remora::REMORA_LEVEL {

struct HeadBlocks {
  HeadBlocks(const Step& step, const Arena& arena, int32_t sequence, int32_t layer, int32_t kv_head)
      : table(step.block_table + static_cast<int64_t>(sequence) * step.table_stride),
        row_bytes(static_cast<int64_t>(arena.head_dim) * (arena.kv_dtype == Dtype::fp32 ? 4 : 2)),
        block_bytes(arena.block_bytes) {
    const int64_t head_bytes = row_bytes * arena.block_tokens, side_bytes = head_bytes * arena.num_kv_heads;
    k = arena.data + 2 * side_bytes * layer + head_bytes * kv_head;
    v = k + side_bytes;
  }

  // The head's rows [block_tokens][head_dim] in the block of a column of the sequence's table.
  uint8_t* k_of(int64_t column) const { return k + table[column] * block_bytes; }
  uint8_t* v_of(int64_t column) const { return v + table[column] * block_bytes; }

  const int32_t* table;
  int64_t row_bytes, block_bytes;
  uint8_t *k, *v;
};

}  // namespace remora::REMORA_LEVEL
