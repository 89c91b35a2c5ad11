// Internal interface of the native CPU kernels. Everything here is plain C++17; the exported C interface is in api.cpp.
//
// Batch invariance: every output row is computed by the same sequence of floating-point operations whatever other rows
// are in the step, however its prompt was cut into chunks, and however many threads run. Reductions over the hidden
// size run over k in ascending order in one accumulator chain per output; attention reduces within fixed chunks of
// ATTENTION_CHUNK positions (aligned to absolute position) and merges chunks in ascending order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace remora {

constexpr int ATTENTION_CHUNK = 512;  // positions; a multiple of every block_tokens in use

enum class Dtype : int32_t { fp32 = 0, bf16 = 1, int8 = 2, int4 = 3, int5 = 4 };  // int5: of K and V alone

// One step, as filled by kernels/batch.py. Names and meaning as there.
struct Step {
  const int32_t* token_ids;    // [T]
  const int32_t* positions;    // [T]
  const int32_t* query_start;  // [S + 1]
  const int32_t* context_len;  // [S]
  const int32_t* block_table;  // [S, table_stride]
  const int32_t* logit_rows;   // [R]
  int32_t num_tokens, num_sequences, num_logit_rows, table_stride;
  uint8_t* not_finite;  // [S], set to 1 where K or V of the step has a value that its precision cannot hold; may be null
  const float* hidden;  // [T, hidden_size] what the stage before has given; null where tokens are embedded
};

// Arena of one geometry. Block i starts at data + i * block_bytes; inside it
// [layer][K|V][kv_head][token][dim] of k_dtype or v_dtype, without gaps. A head of integers is followed by its
// scales [token][kv_scales] in bf16 (quantise.h).
struct Arena {
  uint8_t* data;
  int64_t data_bytes, block_bytes;
  int32_t num_layers, num_kv_heads, head_dim, block_tokens;
  Dtype k_dtype, v_dtype;
};

// One row of head_dim values of K or V: bytes of its values, and how many scales it has.
constexpr int32_t KV_INT4_GROUP = 64;  // of int5, too
inline bool is_rotated(Dtype dtype) { return dtype == Dtype::int4 || dtype == Dtype::int5; }
inline bool is_quantised(Dtype dtype) { return dtype == Dtype::int8 || is_rotated(dtype); }
inline int64_t kv_row_bytes(Dtype dtype, int64_t head_dim) {
  switch (dtype) {
    case Dtype::fp32: return 4 * head_dim;
    case Dtype::bf16: return 2 * head_dim;
    case Dtype::int8: return head_dim;
    case Dtype::int5: return head_dim / 2 + (head_dim + 63) / 64 * 8;  // fifth bits: whole words of 64
    case Dtype::int4: return head_dim / 2;
  }
  return 0;
}
inline int64_t kv_scales(Dtype dtype, int64_t head_dim) {
  return dtype == Dtype::int8 ? 1 : is_rotated(dtype) ? (head_dim + KV_INT4_GROUP - 1) / KV_INT4_GROUP : 0;
}
inline int64_t kv_head_bytes(const Arena& arena, Dtype dtype) {
  return arena.block_tokens * (kv_row_bytes(dtype, arena.head_dim) + 2 * kv_scales(dtype, arena.head_dim));
}
inline int64_t kv_layer_bytes(const Arena& arena) {
  return arena.num_kv_heads * (kv_head_bytes(arena, arena.k_dtype) + kv_head_bytes(arena, arena.v_dtype));
}

struct Team;  // threads.h: the threads of one step; team.barrier(), team.rank, team.size, team.scratch()

// Instruction-set levels, each better than the one before. Level files are compiled once for each (simd.h).
enum class Level : int32_t { portable = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, amx = 4 };

}  // namespace remora
