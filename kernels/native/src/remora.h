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

enum class Dtype : int32_t { fp32 = 0, bf16 = 1, int8 = 2 };

// One step, as filled by kernels/batch.py. Names and meaning as there.
struct Step {
  const int32_t* token_ids;    // [T]
  const int32_t* positions;    // [T]
  const int32_t* query_start;  // [S + 1]
  const int32_t* context_len;  // [S]
  const int32_t* block_table;  // [S, table_stride]
  const int32_t* logit_rows;   // [R]
  int32_t num_tokens, num_sequences, num_logit_rows, table_stride;
};

// Arena of one geometry. Block i starts at data + i * block_bytes; inside it
// [layer][K|V][kv_head][token][dim] of kv_dtype, without gaps.
struct Arena {
  uint8_t* data;
  int64_t data_bytes, block_bytes;
  int32_t num_layers, num_kv_heads, head_dim, block_tokens;
  Dtype kv_dtype;
};

struct Team;  // threads.h: the threads of one step; team.barrier(), team.rank, team.size, team.scratch()

// Instruction-set levels, each better than the one before. Level files are compiled once for each (simd.h).
enum class Level : int32_t { portable = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, amx = 4 };

}  // namespace remora
