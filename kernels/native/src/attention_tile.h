// A tile of query rows and what one chunk of positions gives for it. Level file header.
#pragma once
#include "attention_blocks.h"
#include "remora.h"

namespace remora::REMORA_LEVEL {

constexpr int MAX_TILE_ROWS = 96;
constexpr int MAX_HEAD_DIM = 256;

struct Tile {
  Tile(const Step& step, const Arena& arena, int32_t sequence, int32_t layer, int32_t kv_head)
      : blocks(step, arena, sequence, layer, kv_head),
        head_dim(arena.head_dim),
        block_tokens(arena.block_tokens) {}

  HeadBlocks blocks;
  int32_t head_dim, block_tokens, num_rows = 0;
  float scale_log2 = 0;           // scale * log2(e): scores are in powers of two
  int32_t visible[MAX_TILE_ROWS];  // positions that row sees, ascending; position + 1
  const float* q = nullptr;        // [num_rows][head_dim], as given

  // Positions of the chunk that the row sees: 0 to ATTENTION_CHUNK.
  int32_t visible_in_chunk(int32_t chunk, int32_t row) const {
    const int32_t count = visible[row] - chunk * ATTENTION_CHUNK;
    return count < 0 ? 0 : count > ATTENTION_CHUNK ? ATTENTION_CHUNK : count;
  }
  int32_t visible_in_chunk(int32_t chunk) const { return visible_in_chunk(chunk, num_rows - 1); }
};

// K that is read after a chunk: of the next chunk or tile.
struct Ahead {
  const HeadBlocks* blocks = nullptr;  // null: nothing follows
  int32_t chunk = 0, num_tokens = 0;
};

// Attention over some positions before division: out = Σ 2^(score - maximum) · v, sum = Σ 2^(score - maximum).
// A row that sees none of them has sum 0.
struct Part {
  Part(float* memory, int64_t num_rows, int64_t head_dim)
      : out(memory), maximum(out + num_rows * head_dim), sum(maximum + num_rows) {}

  float* out;      // [rows][head_dim]
  float* maximum;  // [rows]
  float* sum;      // [rows]
};

// What the chunk routines need besides: bytes of rank-local memory, 64-byte aligned.
size_t portable_chunk_scratch_bytes(const Arena& arena);
void portable_chunk(const Tile& tile, int32_t chunk, Part part, uint8_t* scratch);

// The same with products of bf16 pairs, bf16 K and V; rounds q and the weights to bf16. `has_pairs` says if this level
// was built with them.
bool has_pairs();
size_t pairs_scratch_bytes(const Arena& arena);
void pairs_prepare_tile(const Tile& tile, uint8_t* scratch);  // once per tile, before its chunks
void pairs_chunk(const Tile& tile, int32_t chunk, const Ahead& ahead, Part part, uint8_t* scratch);

// The same with products of bytes, K and V of integers; rounds q to 16 bits and the weights to 15. `has_bytes` says if
// this level was built with them.
bool has_bytes();
size_t bytes_scratch_bytes(const Arena& arena);
void bytes_prepare_tile(const Tile& tile, uint8_t* scratch);  // once per tile, before its chunks
void bytes_chunk(const Tile& tile, int32_t chunk, const Ahead& ahead, Part part, uint8_t* scratch);

// The same with AMX tiles. `has_tiles` says if this level was built with them.
bool has_tiles();
void load_tile_config();
void unload_tile_config();
size_t amx_chunk_scratch_bytes();
void amx_prepare_tile(const Tile& tile, uint8_t* scratch);  // once per tile, before its chunks
void amx_chunk(const Tile& tile, int32_t chunk, Part part, uint8_t* scratch);

}  // namespace remora::REMORA_LEVEL
