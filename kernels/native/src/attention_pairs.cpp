// Attention of one chunk with products of bf16 pairs (VDPBF16PS), 12 query rows at a time, on the kernels of the linear
// layers: K, transposed, and V, in pairs of tokens, are packed as weights are, once for all rows of a tile.
//
//   scores[row][token] = Q · Kᵀ     rows of Q are the activations, 32 tokens a panel, pairs of dims
//   out[row][dim]      = P · V      rows of weights are the activations, 32 dims a panel, pairs of tokens
//
// Q and the weights are rounded to bf16.
#include "attention_chunk.h"

namespace remora::REMORA_LEVEL {

#if REMORA_DPBF16
namespace {

constexpr int PASS_ROWS = 12;  // 24 sums, what they multiply, and nothing else in registers
// Lines of pairs: 16 columns of 4 bytes. One more than a chunk has, so that blocks do not share cache sets.
constexpr int64_t VALUE_LINES = ATTENTION_CHUNK / 2 + 1;
constexpr int64_t WEIGHT_ROW_BYTES = ATTENTION_CHUNK * 2 + LINE_BYTES;

// Rank-local memory of a tile.
struct PairsScratch {
  static size_t bytes(int64_t dim) { return PairsScratch(nullptr, dim).end; }

  PairsScratch(uint8_t* memory, int64_t dim) {
    const auto take = [&](int64_t count) {
      uint8_t* const part = memory + end;
      end += static_cast<size_t>(count);
      return part;
    };
    const int64_t dim_blocks = round_up(dim, PANEL_COLUMNS) / BLOCK_COLUMNS;
    keys = take(ATTENTION_CHUNK * dim * 2);
    values = take(dim_blocks * VALUE_LINES * LINE_BYTES);
    scores = reinterpret_cast<float*>(take(PASS_ROWS * ATTENTION_CHUNK * 4));
    sums = reinterpret_cast<float*>(take(PASS_ROWS * dim_blocks * BLOCK_COLUMNS * 4));
    weights = take(PASS_ROWS * WEIGHT_ROW_BYTES);
    queries = reinterpret_cast<uint16_t*>(take((MAX_TILE_ROWS + PASS_ROWS) * dim * 2));
  }

  size_t end = 0;
  uint8_t *keys, *values;  // [panel][16-token group][pair of dims], [16 dims][pair of tokens]: lines of 16 pairs
  float *scores, *sums;    // [panel][row][32]: of tokens, of dims
  uint8_t* weights;        // [row][token] bf16, WEIGHT_ROW_BYTES a row
  uint16_t* queries;       // [row][dim]
};

// A kernel of at least `rows` rows, up to PASS_ROWS; it computes spare rows. Groups of query heads often have 3 or 6.
using Multiply = void (*)(const MicroTile&);
Multiply kernel_for(int rows) {
  if (rows == 1) return sum_products<ProductBf16Pairs, 1, 2>;
  if (rows == 2) return sum_products<ProductBf16Pairs, 2, 2>;
  if (rows == 3) return sum_products<ProductBf16Pairs, 3, 2>;
  if (rows == 4) return sum_products<ProductBf16Pairs, 4, 2>;
  if (rows <= 6) return sum_products<ProductBf16Pairs, 6, 2>;
  if (rows <= 8) return sum_products<ProductBf16Pairs, 8, 2>;
  return sum_products<ProductBf16Pairs, PASS_ROWS, 2>;
}

// 16 rows of K to lines of pairs, a lane a token.
void pack_key_group(const uint16_t* rows, int dim, uint8_t* target) {
  int d = 0;
  for (; d + 32 <= dim; d += 32, target += 16 * LINE_BYTES) {
    vuint pairs[16];
    for (int i = 0; i < 16; ++i) pairs[i] = load_as<vuint>(rows + i * dim + d);
    transpose(pairs);
    for (int i = 0; i < 16; ++i) store_as(target + i * LINE_BYTES, pairs[i]);
  }
  if (d == dim) return;
  vuint pairs[16];
  for (int i = 0; i < 16; ++i) {
    pairs[i] = vuint{};
    __builtin_memcpy(&pairs[i], rows + i * dim + d, 32);
  }
  transpose(pairs);
  for (int i = 0; i < 8; ++i) store_as(target + i * LINE_BYTES, pairs[i]);
}

void pack_key_panel(const ChunkSide& keys, int token, int num_tokens, int dim, uint8_t* target) {
  for (int end = token + PANEL_TOKENS; token < end && token < num_tokens; token += GROUP_TOKENS) {
    pack_key_group(keys.rows_of(token), dim, target);
    target += dim / 2 * LINE_BYTES;
  }
}

// Two rows of V, side by side in pairs of 16 bits, to the same line of every 16 dims.
void pack_value_pair(const uint16_t* even, const uint16_t* odd, int dim, uint8_t* target) {
  vshort low, high;
  for (int i = 0; i < 32; ++i) {
    low[i] = static_cast<int16_t>(i / 2 + (i % 2) * 32);
    high[i] = static_cast<int16_t>(16 + i / 2 + (i % 2) * 32);
  }
  constexpr int64_t BLOCK_BYTES = VALUE_LINES * LINE_BYTES;
  int d = 0;
  for (; d + 32 <= dim; d += 32, target += 2 * BLOCK_BYTES) {
    const vshort a = load_as<vshort>(even + d), b = load_as<vshort>(odd + d);
    store_as(target, __builtin_shuffle(a, b, low));
    store_as(target + BLOCK_BYTES, __builtin_shuffle(a, b, high));
  }
  if (d < dim) store_as(target, load_u16(even + d) | load_u16(odd + d) << 16);
}

// Tokens from num_tokens on are zero, whatever their slots hold.
void pack_value_panel(const ChunkSide& values, int token, int num_tokens, int dim, const PairsScratch& scratch) {
  constexpr uint16_t ZEROS[MAX_HEAD_DIM] = {};
  for (int end = token + PANEL_TOKENS; token < end && token < num_tokens; token += GROUP_TOKENS) {
    const uint16_t* rows = values.rows_of(token);
    for (int i = 0; i < GROUP_TOKENS && token + i < num_tokens; i += 2, rows += 2 * dim)
      pack_value_pair(rows, token + i + 1 < num_tokens ? rows + dim : ZEROS, dim,
                      scratch.values + (token + i) / 2 * LINE_BYTES);
  }
}

// 32 weights as bf16, in their order.
REMORA_INLINE vint round_pairs(vfloat first, vfloat second) {
#if REMORA_EMULATE
  uint16_t rounded[32];
  store_bf16(rounded, first), store_bf16(rounded + 16, second);
  return load_as<vint>(rounded);
#else
  return (vint)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
}

// Scores of a row, in panels, to weights 2^(score - maximum), zero where it does not see. The sum is over the weights as
// rounded.
void soften_row(const float* scores, int visible, int num_tokens, float scale_log2, uint8_t* weights, float* maximum,
                float* sum) {
  constexpr int64_t PANEL_FLOATS = PASS_ROWS * PANEL_TOKENS;
  const vfloat minus_infinity = splat(-__builtin_inff()), scale = splat(scale_log2);
  vint lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const vint second_lane = lane + LANES;
  const int whole = visible / PANEL_TOKENS, rest = visible % PANEL_TOKENS;
  vfloat first_top = minus_infinity, second_top = minus_infinity;
  for (int panel = 0; panel < whole; ++panel) {
    first_top = max(first_top, load(scores + panel * PANEL_FLOATS));
    second_top = max(second_top, load(scores + panel * PANEL_FLOATS + LANES));
  }
  const float* tail = scores + whole * PANEL_FLOATS;
  if (rest > 0) first_top = lane < rest ? max(first_top, load(tail)) : first_top;
  if (rest > LANES) second_top = second_lane < rest ? max(second_top, load(tail + LANES)) : second_top;
  *maximum = max(max(first_top, second_top)) * scale_log2;
  const vfloat shift = splat(-*maximum);
  const vint ones = splat_int(0x3f803f80);
  vfloat total = {};
  for (int panel = 0; panel < whole; ++panel, weights += LINE_BYTES) {
    const float* from = scores + panel * PANEL_FLOATS;
    const vint rounded = round_pairs(exp2_of_score(fma(load(from), scale, shift)),
                                       exp2_of_score(fma(load(from + LANES), scale, shift)));
    store_as(weights, rounded);
    total = ProductBf16Pairs::multiply_add(rounded, ones, total);
  }
  int panel = whole;
  if (rest > 0) {
    const vfloat first = exp2_of_score(fma(load(tail), scale, shift));
    const vfloat second = exp2_of_score(fma(load(tail + LANES), scale, shift));
    const vint rounded =
        round_pairs(lane < rest ? first : vfloat{}, second_lane < rest ? second : vfloat{});
    store_as(weights, rounded);
    total = ProductBf16Pairs::multiply_add(rounded, ones, total);
    ++panel, weights += LINE_BYTES;
  }
  for (; panel * PANEL_TOKENS < num_tokens; ++panel, weights += LINE_BYTES) store_as(weights, vint{});
  *sum = remora::REMORA_LEVEL::sum(total);
}

// Up to PASS_ROWS rows of a tile from `first` on.
class Pass {
 public:
  Pass(const Tile& tile, int32_t chunk, int first, const PairsScratch& scratch)
      : tile_(tile),
        chunk_(chunk),
        first_(first),
        num_rows_(tile.num_rows - first < PASS_ROWS ? tile.num_rows - first : PASS_ROWS),
        num_tokens_(tile.visible_in_chunk(chunk, first + num_rows_ - 1)),
        scratch_(scratch),
        multiply_(kernel_for(num_rows_)) {}

  int num_tokens() const { return num_tokens_; }

  void score_panel(int panel, const uint8_t* keys, const Prefetch& prefetch) const {
    const int64_t dim = tile_.head_dim;
    multiply({reinterpret_cast<const uint8_t*>(scratch_.queries + first_ * dim), dim * 2, keys, dim / 2 * LINE_BYTES,
              dim / 2, scratch_.scores + panel * PASS_ROWS * PANEL_TOKENS, false, prefetch});
  }

  void soften(Part part) const {
    for (int row = 0; row < num_rows_; ++row)
      soften_row(scratch_.scores + row * PANEL_TOKENS, tile_.visible_in_chunk(chunk_, first_ + row), num_tokens_,
                 tile_.scale_log2, scratch_.weights + row * WEIGHT_ROW_BYTES, part.maximum + first_ + row,
                 part.sum + first_ + row);
  }

  // Adds the tokens [token, end) of the chunk to the sums, which the first call sets.
  void attend_values(int token, int end, const Prefetch& prefetch) const {
    constexpr int64_t BLOCK_BYTES = VALUE_LINES * LINE_BYTES;
    const int64_t line = token / 2, lines = (end - token + 1) / 2;
    Prefetch part = prefetch;
    for (int d = 0; d < tile_.head_dim; d += PANEL_COLUMNS) {
      multiply({scratch_.weights + line * 4, WEIGHT_ROW_BYTES,
                scratch_.values + d / BLOCK_COLUMNS * BLOCK_BYTES + line * LINE_BYTES, BLOCK_BYTES, lines,
                scratch_.sums + d * PASS_ROWS, token > 0, part});
      part.next += part.bytes_per_line * lines;
    }
  }

  void write_values(Part part) const {
    const int dim = tile_.head_dim;
    for (int d = 0; d < dim; d += LANES)
      for (int row = 0; row < num_rows_; ++row)
        store(part.out + (first_ + row) * dim + d,
              load(scratch_.sums + d / PANEL_COLUMNS * PANEL_COLUMNS * PASS_ROWS + row * PANEL_COLUMNS + d % PANEL_COLUMNS));
  }

 private:
  void multiply(const MicroTile& call) const { multiply_(call); }

  const Tile& tile_;
  const int32_t chunk_;
  const int first_, num_rows_, num_tokens_;
  const PairsScratch& scratch_;
  const Multiply multiply_;
};

}  // namespace

bool has_pairs() { return true; }

size_t pairs_scratch_bytes(const Arena& arena) { return PairsScratch::bytes(arena.head_dim); }

void pairs_prepare_tile(const Tile& tile, uint8_t* memory) {
  const PairsScratch scratch(memory, tile.head_dim);
  const int dim = tile.head_dim;
  for (int i = 0; i < tile.num_rows * dim; i += LANES) store_bf16(scratch.queries + i, load(tile.q + i));
}

void pairs_chunk(const Tile& tile, int32_t chunk, const Ahead& ahead, Part part, uint8_t* memory) {
  const PairsScratch scratch(memory, tile.head_dim);
  const int dim = tile.head_dim, num_tokens = tile.visible_in_chunk(chunk);
  const ChunkSide keys(tile, tile.blocks, tile.blocks.k, chunk), values(tile, tile.blocks, tile.blocks.v, chunk);
  const HeadBlocks& next = ahead.blocks != nullptr ? *ahead.blocks : tile.blocks;
  const ChunkSide later(tile, next, next.k, ahead.chunk);
  const int64_t panel_bytes = dim * LINE_BYTES;
  // A single pass takes each panel while it is in the level-1 cache, and fetches what comes a phase later.
  if (tile.num_rows <= PASS_ROWS) {
    const Pass pass(tile, chunk, 0, scratch);
    for (int token = 0; token < num_tokens; token += PANEL_TOKENS) {
      pack_key_panel(keys, token, num_tokens, dim, scratch.keys);
      pass.score_panel(token / PANEL_TOKENS, scratch.keys, values.prefetch(token, num_tokens, dim / 2));
    }
    pass.soften(part);
    const int64_t value_lines = PANEL_TOKENS / 2 * (round_up(dim, PANEL_COLUMNS) / PANEL_COLUMNS);
    for (int token = 0; token < num_tokens; token += PANEL_TOKENS) {
      pack_value_panel(values, token, num_tokens, dim, scratch);
      pass.attend_values(token, num_tokens - token < PANEL_TOKENS ? num_tokens : token + PANEL_TOKENS,
                         later.prefetch(token, ahead.num_tokens, value_lines));
    }
    pass.write_values(part);
  } else {
    const Prefetch nothing = keys.nothing();
    for (int token = 0; token < num_tokens; token += PANEL_TOKENS) {
      pack_key_panel(keys, token, num_tokens, dim, scratch.keys + token / PANEL_TOKENS * panel_bytes);
      pack_value_panel(values, token, num_tokens, dim, scratch);
    }
    for (int first = 0; first < tile.num_rows; first += PASS_ROWS) {
      const Pass pass(tile, chunk, first, scratch);
      for (int token = 0; token < pass.num_tokens(); token += PANEL_TOKENS)
        pass.score_panel(token / PANEL_TOKENS, scratch.keys + token / PANEL_TOKENS * panel_bytes, nothing);
      pass.soften(part);
      pass.attend_values(0, pass.num_tokens(), nothing);
      pass.write_values(part);
    }
  }
}

#else  // other levels never call these

bool has_pairs() { return false; }
size_t pairs_scratch_bytes(const Arena&) { return 0; }
void pairs_prepare_tile(const Tile&, uint8_t*) {}
void pairs_chunk(const Tile&, int32_t, const Ahead&, Part, uint8_t*) {}

#endif

}  // namespace remora::REMORA_LEVEL
