#include "attention_kernels.h"
#include "attention_tile.h"
#include "quantise.h"

namespace remora::REMORA_LEVEL {
namespace {

constexpr int SCORES_STRIDE = ATTENTION_CHUNK, MAX_BLOCK_TOKENS = ATTENTION_CHUNK;

// Scores of one row to weights 2^(score - maximum); zeros from `visible` up to `width`.
void soften_row(float* scores, int visible, int width, float* maximum, float* sum) {
  vint lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const vfloat minus_infinity = splat(-__builtin_inff());
  vfloat top = minus_infinity;
  const int whole = visible / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) top = max(top, load(scores + i));
  const vint seen = lane < visible - whole;
  if (whole < visible) top = max(top, seen ? load(scores + whole) : minus_infinity);
  const float row_maximum = max(top);
  const vfloat shift = splat(row_maximum);
  vfloat total = {};
  for (int i = 0; i < whole; i += LANES) {
    const vfloat weight = exp2_of_negative(load(scores + i) - shift);
    store(scores + i, weight);
    total += weight;
  }
  int end = whole;
  if (whole < visible) {
    const vfloat weight = seen ? exp2_of_negative(load(scores + whole) - shift) : vfloat{};
    store(scores + whole, weight);
    total += weight;
    end += LANES;
  }
  for (int i = end; i < width; ++i) scores[i] = 0;
  *maximum = row_maximum;
  *sum = remora::REMORA_LEVEL::sum(total);
}

// How rows of one precision are read. `Direct` rows are read as they lie; `widen` makes fp32 of a block's rows, in the
// order of `arrange<Value>`, and its values are those that direct reading multiplies.
template <class T>
struct PlainRows {
  using Value = T;
  static constexpr bool DIRECT = true, SCALED = false, ROTATED = false;
  static void widen(const uint8_t* rows, const uint16_t*, int tokens, int head_dim, float* target) {
    constexpr int PARTS = VECTORS_PER_LOAD<T>;
    const T* source = reinterpret_cast<const T*>(rows);
    for (int i = 0; i < tokens * head_dim; i += PARTS * LANES)
      for (int part = 0; part < PARTS; ++part) store(target + i + part * LANES, load_part(source + i, part));
  }
};

// A score is multiplied by its token's scale of K afterwards, a weight by that of V beforehand.
struct Int8Rows : PlainRows<int8_t> {
  static constexpr bool SCALED = true;
};

// Scales are applied on the way to fp32; rows are rotated, and so are the queries and the result.
template <bool FIVE>
struct RotatedRows {
  using Value = float;
  static constexpr bool DIRECT = false, SCALED = false, ROTATED = true;
  static void widen(const uint8_t* rows, const uint16_t* scales, int tokens, int head_dim, float* target) {
    constexpr Dtype DTYPE = FIVE ? Dtype::int5 : Dtype::int4;
    const int64_t row_bytes = kv_row_bytes(DTYPE, head_dim), num_scales = kv_scales(DTYPE, head_dim);
    for (int token = 0; token < tokens; ++token)
      widen_rotated<FIVE>(rows + token * row_bytes, scales + token * num_scales, head_dim, target + token * head_dim);
  }
};

// Rank-local memory of a chunk.
struct Scratch {
  Scratch(uint8_t* memory, int32_t head_dim)
      : scores(reinterpret_cast<float*>(memory)),
        rows(scores + MAX_TILE_ROWS * SCORES_STRIDE),
        wide(rows + static_cast<int64_t>(MAX_TILE_ROWS) * (head_dim > MAX_BLOCK_TOKENS ? head_dim : MAX_BLOCK_TOKENS)) {}

  float* scores;  // [rows][SCORES_STRIDE]
  float* rows;    // queries, then a block's weights with scales: [rows][head_dim or block_tokens]
  float* wide;    // a block's rows in fp32
};

void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Rows of several passes share the work of widening; the values are the same either way.
template <class Rows>
bool widens(int num_rows) {
  return !Rows::DIRECT || (sizeof(typename Rows::Value) < 4 && num_rows > 2 * MAX_PASS_ROWS);
}

template <class K>
void score_chunk(const Tile& tile, int64_t first_column, int num_tokens, const uint8_t* after, const Scratch& scratch) {
  using T = typename K::Value;
  const int rows = tile.num_rows, dim = tile.head_dim, block_tokens = tile.block_tokens;
  float *q = scratch.rows, *wide = scratch.wide;
  const vfloat scale = splat(tile.scale_log2);
  for (int row = 0; row < rows; ++row) {
    arrange<T>(tile.q + row * dim, dim, q + row * dim);
    if (K::ROTATED) hadamard(q + row * dim, dim);
  }
  for (int i = 0; i < rows * dim; i += LANES) store(q + i, load(q + i) * scale);
  const int num_columns = (num_tokens + block_tokens - 1) / block_tokens;
  for (int column = 0; column < num_columns; ++column) {
    const int start = column * block_tokens;
    // Whole fours: the block has them, and scores of slots that a row does not see are replaced.
    const int tokens = (num_tokens - start < block_tokens ? num_tokens - start + 3 : block_tokens) / 4 * 4;
    const uint8_t* k = tile.blocks.k_of(first_column + column);
    const uint16_t* scales = tile.blocks.scales_of(tile.blocks.k, first_column + column);
    const uint8_t* next = column + 1 < num_columns ? tile.blocks.k_of(first_column + column + 1) : after;
    float* scores = scratch.scores + start;
    if (widens<K>(rows)) {
      prefetch(next, tokens * tile.blocks.k.row_bytes);
      K::widen(k, scales, tokens, dim, wide);
      score_block(q, rows, wide, wide, dim, tokens, scores, SCORES_STRIDE);
    } else if constexpr (K::DIRECT) {
      score_block(q, rows, reinterpret_cast<const T*>(k), reinterpret_cast<const T*>(next), dim, tokens, scores,
                  SCORES_STRIDE);
    }
    if (K::SCALED)
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < tokens; i += LANES)
          store(scores + row * SCORES_STRIDE + i, load(scores + row * SCORES_STRIDE + i) * load_bf16(scales + i));
  }
}

template <class V>
void value_chunk(const Tile& tile, int64_t first_column, int num_tokens, const Scratch& scratch, float* out) {
  using T = typename V::Value;
  const int rows = tile.num_rows, dim = tile.head_dim, block_tokens = tile.block_tokens;
  __builtin_memset(out, 0, sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(dim));
  const int num_columns = (num_tokens + block_tokens - 1) / block_tokens;
  for (int column = 0; column < num_columns; ++column) {
    const int start = column * block_tokens;
    const int tokens = num_tokens - start < block_tokens ? num_tokens - start : block_tokens;
    const uint8_t* v = tile.blocks.v_of(first_column + column);
    const uint16_t* scales = tile.blocks.scales_of(tile.blocks.v, first_column + column);
    const uint8_t* next = tile.blocks.v_of(first_column + (column + 1 < num_columns ? column + 1 : column));
    const float* weights = scratch.scores + start;
    int64_t stride = SCORES_STRIDE;
    if (V::SCALED) {
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < tokens; i += LANES)  // beyond `tokens` nothing is read
          store(scratch.rows + row * block_tokens + i, load(weights + row * SCORES_STRIDE + i) * load_bf16(scales + i));
      weights = scratch.rows, stride = block_tokens;
    }
    if (widens<V>(rows)) {
      prefetch(next, tokens * tile.blocks.v.row_bytes);
      V::widen(v, scales, tokens, dim, scratch.wide);
      value_block(weights, stride, rows, scratch.wide, scratch.wide, dim, tokens, out);
    } else if constexpr (V::DIRECT) {
      value_block(weights, stride, rows, reinterpret_cast<const T*>(v), reinterpret_cast<const T*>(next), dim, tokens,
                  out);
    }
  }
  for (int row = 0; row < rows; ++row) {
    restore<T>(out + row * dim, dim);
    if (V::ROTATED) hadamard(out + row * dim, dim);
  }
}

// Calls body with how rows of `dtype` are read.
template <class Body>
void with_rows(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::fp32: return body(PlainRows<float>{});
    case Dtype::bf16: return body(PlainRows<uint16_t>{});
    case Dtype::int8: return body(Int8Rows{});
    case Dtype::int5: return body(RotatedRows<true>{});
    case Dtype::int4: return body(RotatedRows<false>{});
  }
}

}  // namespace

size_t portable_chunk_scratch_bytes(const Arena& arena) {
  const int64_t row = arena.head_dim > MAX_BLOCK_TOKENS ? arena.head_dim : MAX_BLOCK_TOKENS;
  const int64_t floats = static_cast<int64_t>(MAX_TILE_ROWS) * (SCORES_STRIDE + row) +
                         static_cast<int64_t>(arena.block_tokens) * arena.head_dim;
  return static_cast<size_t>(floats) * sizeof(float);
}

void portable_chunk(const Tile& tile, int32_t chunk, Part part, uint8_t* memory) {
  const Scratch scratch(memory, tile.head_dim);
  const int num_tokens = tile.visible_in_chunk(chunk);
  const int64_t first_column = static_cast<int64_t>(chunk) * ATTENTION_CHUNK / tile.block_tokens;
  with_rows(tile.blocks.k.dtype, [&](auto k) {
    score_chunk<decltype(k)>(tile, first_column, num_tokens, tile.blocks.v_of(first_column), scratch);
  });
  for (int row = 0; row < tile.num_rows; ++row)
    soften_row(scratch.scores + row * SCORES_STRIDE, tile.visible_in_chunk(chunk, row), num_tokens, part.maximum + row,
               part.sum + row);
  with_rows(tile.blocks.v.dtype,
            [&](auto v) { value_chunk<decltype(v)>(tile, first_column, num_tokens, scratch, part.out); });
}

}  // namespace remora::REMORA_LEVEL
