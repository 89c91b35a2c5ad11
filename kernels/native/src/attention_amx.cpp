// Attention of one chunk on AMX tiles, 16 query rows at a time, bf16 K and V read as they lie in their blocks.
//
//   scores[token][row] = K · Qᵀ     A: 16 rows of K, straight from the block      B: Qᵀ in pairs, packed once per tile
//   out[row][dim]      = P · V      A: weights as bf16, transposed to row order   B: V in pairs of tokens, per 32 tokens
//
// The tile of 16 rows may have fewer query rows: the columns of the others are zero, and their weights too.
#include "attention_kernels.h"
#include "attention_tile.h"
#include "tiles.h"

namespace remora::REMORA_LEVEL {

#if REMORA_TILES
namespace {

constexpr int ROWS = 16;         // of query, one a lane
constexpr int GROUP_TOKENS = 16;  // rows of K in an A tile
constexpr int STEP_TOKENS = 32;   // tokens in an A tile of weights
constexpr int STEP_DIMS = 32;     // dims in an A tile of K
constexpr int MAX_DIM_STEPS = MAX_HEAD_DIM / STEP_DIMS;
constexpr int PASS_DIMS = 64;  // of V at once: four C tiles

// Tiles 0..4 and 7 are whole; 5 and 6 are for the last 16 of a head_dim that is no multiple of 32.
constexpr int HALF_A = 5, HALF_B = 6;

struct AmxScratch {
  alignas(64) uint16_t q[MAX_DIM_STEPS][ROWS][STEP_DIMS];        // [pair of dims][row][2] per dim step
  alignas(64) float scores[ATTENTION_CHUNK][ROWS];
  alignas(64) uint16_t weights[ATTENTION_CHUNK / STEP_TOKENS][ROWS][STEP_TOKENS];
  alignas(64) uint16_t values[PASS_DIMS / 16][STEP_TOKENS / 2][16][2];  // [pair of tokens][dim][2] per 16 dims
};

struct ChunkBlocks {
  ChunkBlocks(const Tile& tile, int32_t chunk)
      : blocks(tile.blocks),
        block_tokens(tile.block_tokens),
        first_column(static_cast<int64_t>(chunk) * ATTENTION_CHUNK / tile.block_tokens) {}

  // Rows of the chunk's tokens from `token` on, up to the end of their block.
  const uint16_t* k_of(int token) const { return row(blocks.k_of(first_column + token / block_tokens), token); }
  const uint16_t* v_of(int token) const { return row(blocks.v_of(first_column + token / block_tokens), token); }

 private:
  const uint16_t* row(const uint8_t* block, int token) const {
    return reinterpret_cast<const uint16_t*>(block + token % block_tokens * blocks.k.row_bytes);
  }

  const HeadBlocks& blocks;
  const int block_tokens;
  const int64_t first_column;
};

void prefetch_rows(const uint16_t* rows, int count, int dim) {
  for (int i = 0; i < count * dim; i += 32) __builtin_prefetch(rows + i);
}

// Scores of one or two groups of 16 tokens; two overlap their chains of products.
template <bool TWO>
void score_groups(const AmxScratch& scratch, const uint16_t* first, const uint16_t* second, int dim, float* target) {
  const int64_t stride = dim * 2;
  tile_zero<0>();
  if (TWO) tile_zero<1>();
  for (int d = 0; d + STEP_DIMS <= dim; d += STEP_DIMS) {
    tile_load<4>(scratch.q[d / STEP_DIMS], 64);
    tile_load<2>(first + d, stride);
    dot_bf16<0, 2, 4>();
    if (TWO) {
      tile_load<3>(second + d, stride);
      dot_bf16<1, 3, 4>();
    }
  }
  if (dim % STEP_DIMS != 0) {
    const int d = dim / STEP_DIMS * STEP_DIMS;
    tile_load<HALF_B>(scratch.q[d / STEP_DIMS], 64);
    tile_load<HALF_A>(first + d, stride);
    dot_bf16<0, HALF_A, HALF_B>();
    if (TWO) {
      tile_load<HALF_A>(second + d, stride);
      dot_bf16<1, HALF_A, HALF_B>();
    }
  }
  tile_store<0>(target, 64);
  if (TWO) tile_store<1>(target + GROUP_TOKENS * ROWS, 64);
}

void compute_scores(const Tile& tile, const ChunkBlocks& blocks, int num_tokens, AmxScratch& scratch) {
  for (int token = 0; token < num_tokens; token += 2 * GROUP_TOKENS) {
    const int second = token + GROUP_TOKENS, next = token + 2 * GROUP_TOKENS;
    if (next < num_tokens) prefetch_rows(blocks.k_of(next), GROUP_TOKENS, tile.head_dim);
    if (next + GROUP_TOKENS < num_tokens)
      prefetch_rows(blocks.k_of(next + GROUP_TOKENS), GROUP_TOKENS, tile.head_dim);
    float* target = scratch.scores[token];
    if (second < num_tokens) {
      score_groups<true>(scratch, blocks.k_of(token), blocks.k_of(second), tile.head_dim, target);
    } else {
      score_groups<false>(scratch, blocks.k_of(token), nullptr, tile.head_dim, target);
    }
  }
}

// Weights of all rows for the chunk, zero where a row does not see. The sums are over the weights as rounded.
void compute_weights(const Tile& tile, int32_t chunk, int num_tokens, AmxScratch& scratch, Part part) {
  vint visible = {};
  for (int row = 0; row < tile.num_rows; ++row) visible[row] = tile.visible_in_chunk(chunk, row);
  // Rows ascend in position: what the first sees all see (of lanes without a row nothing is read).
  const int seen_by_all = visible[0];
  vfloat top = splat(-__builtin_inff());
  int token = 0;
  for (; token < seen_by_all; ++token) top = max(top, load(scratch.scores[token]));
  for (; token < num_tokens; ++token)
    top = splat_int(token) < visible ? max(top, load(scratch.scores[token])) : top;
  const vfloat scale = splat(tile.scale_log2), maximum = top * scale;
  vfloat total = {};
  for (int step = 0; step * STEP_TOKENS < num_tokens; ++step) {
    vuint pairs[ROWS];
    for (int pair = 0; pair < STEP_TOKENS / 2; ++pair) {
      vuint bits[2];
      for (int i = 0; i < 2; ++i) {
        const int at = step * STEP_TOKENS + 2 * pair + i;
        const vfloat weight = exp2_of_negative(fma(load(scratch.scores[at]), scale, -maximum));
        bits[i] = round_bf16(splat_int(at) < visible ? weight : vfloat{});
        total += (vfloat)bits[i];
      }
      pairs[pair] = (bits[0] >> 16) | bits[1];
    }
    transpose(pairs);
    for (int row = 0; row < ROWS; ++row) store_as(scratch.weights[step][row], pairs[row]);
  }
  for (int row = 0; row < tile.num_rows; ++row) {
    part.maximum[row] = maximum[row];
    part.sum[row] = total[row];
  }
}

// V of a step's tokens in pairs; tokens from num_tokens on are zero, whatever their slots hold.
void pair_values(const ChunkBlocks& blocks, int step, int num_tokens, int dim, int first_dim, int num_dims,
                 AmxScratch& scratch) {
  for (int pair = 0; pair < STEP_TOKENS / 2; ++pair) {
    const int token = step * STEP_TOKENS + 2 * pair;
    const uint16_t* v = token < num_tokens ? blocks.v_of(token) + first_dim : nullptr;
    for (int d = 0; d < num_dims; d += 16) {
      vuint pairs = {};
      if (v != nullptr) pairs = load_u16(v + d);
      if (token + 1 < num_tokens) pairs |= load_u16(v + dim + d) << 16;
      store_as(scratch.values[d / 16][pair], pairs);
    }
  }
}

template <int TILES>
void attend_values(const Tile& tile, const ChunkBlocks& blocks, int num_tokens, int first_dim, AmxScratch& scratch,
                   float* out) {
  tile_zero<0>();
  if (TILES > 1) tile_zero<1>();
  if (TILES > 2) tile_zero<2>();
  if (TILES > 3) tile_zero<3>();
  for (int step = 0; step * STEP_TOKENS < num_tokens; ++step) {
    const int next = (step + 1) * STEP_TOKENS;
    for (int token = next; token < num_tokens && token < next + STEP_TOKENS; token += GROUP_TOKENS)
      prefetch_rows(blocks.v_of(token), GROUP_TOKENS, tile.head_dim);
    pair_values(blocks, step, num_tokens, tile.head_dim, first_dim, TILES * 16, scratch);
    tile_load<4>(scratch.weights[step], 64);
    tile_load<7>(scratch.values[0], 64);
    dot_bf16<0, 4, 7>();
    if (TILES > 1) tile_load<7>(scratch.values[1], 64), dot_bf16<1, 4, 7>();
    if (TILES > 2) tile_load<7>(scratch.values[2], 64), dot_bf16<2, 4, 7>();
    if (TILES > 3) tile_load<7>(scratch.values[3], 64), dot_bf16<3, 4, 7>();
  }
  const int64_t stride = tile.head_dim * 4;
  tile_store<0>(out, stride);
  if (TILES > 1) tile_store<1>(out + 16, stride);
  if (TILES > 2) tile_store<2>(out + 32, stride);
  if (TILES > 3) tile_store<3>(out + 48, stride);
}

}  // namespace

bool has_tiles() { return true; }

void load_tile_config() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  config.set(HALF_A, 16, 32);
  config.set(HALF_B, 8, 64);
  tile_configure(config);
}

void unload_tile_config() { tile_release(); }

size_t amx_chunk_scratch_bytes() { return sizeof(AmxScratch); }

void amx_prepare_tile(const Tile& tile, uint8_t* memory) {
  AmxScratch& scratch = *reinterpret_cast<AmxScratch*>(memory);
  __builtin_memset(scratch.q, 0, sizeof scratch.q);
  for (int row = 0; row < tile.num_rows; ++row)
    for (int d = 0; d < tile.head_dim; ++d)
      scratch.q[d / STEP_DIMS][d % STEP_DIMS / 2][row * 2 + d % 2] = to_bf16(tile.q[row * tile.head_dim + d]);
}

void amx_chunk(const Tile& tile, int32_t chunk, Part part, uint8_t* memory) {
  AmxScratch& scratch = *reinterpret_cast<AmxScratch*>(memory);
  const ChunkBlocks blocks(tile, chunk);
  const int num_tokens = tile.visible_in_chunk(chunk);
  compute_scores(tile, blocks, num_tokens, scratch);
  compute_weights(tile, chunk, num_tokens, scratch, part);
  for (int d = 0; d < tile.head_dim; d += PASS_DIMS) {
    switch (tile.head_dim - d) {
      case 16: attend_values<1>(tile, blocks, num_tokens, d, scratch, part.out + d); break;
      case 32: attend_values<2>(tile, blocks, num_tokens, d, scratch, part.out + d); break;
      case 48: attend_values<3>(tile, blocks, num_tokens, d, scratch, part.out + d); break;
      default: attend_values<4>(tile, blocks, num_tokens, d, scratch, part.out + d);
    }
  }
}

#else  // levels without tiles never call these

bool has_tiles() { return false; }
void load_tile_config() {}
void unload_tile_config() {}
size_t amx_chunk_scratch_bytes() { return 0; }
void amx_prepare_tile(const Tile&, uint8_t*) {}
void amx_chunk(const Tile&, int32_t, Part, uint8_t*) {}

#endif

}  // namespace remora::REMORA_LEVEL
