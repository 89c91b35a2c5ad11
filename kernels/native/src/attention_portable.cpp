#include "attention_kernels.h"
#include "attention_tile.h"

namespace remora::REMORA_LEVEL {
namespace {

constexpr int SCORES_STRIDE = ATTENTION_CHUNK;

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

// `count` values of bf16 as fp32, in the order of `arrange`.
void widen(const uint16_t* source, const uint16_t* next, int count, float* target) {
  for (int i = 0; i < count; i += 32) __builtin_prefetch(next + i);
  constexpr int PARTS = VECTORS_PER_LOAD<uint16_t>;
  for (int i = 0; i < count; i += PARTS * LANES)
    for (int part = 0; part < PARTS; ++part) store(target + i + part * LANES, load_part(source + i, part));
}

template <class T>
void run_chunk(const Tile& tile, int32_t chunk, Part part, float* memory) {
  float* scores = memory;
  float* q = scores + MAX_TILE_ROWS * SCORES_STRIDE;
  float* wide = q + static_cast<int64_t>(MAX_TILE_ROWS) * tile.head_dim;
  // Rows of several passes share the work of widening; the values are the same either way.
  const bool widens = sizeof(T) == 2 && tile.num_rows > 2 * MAX_PASS_ROWS;
  const int rows = tile.num_rows, dim = tile.head_dim, block_tokens = tile.block_tokens;
  const int num_tokens = tile.visible_in_chunk(chunk);
  const int64_t first_column = static_cast<int64_t>(chunk) * ATTENTION_CHUNK / block_tokens;
  const int num_columns = (num_tokens + block_tokens - 1) / block_tokens;
  const auto k_of = [&](int column) { return reinterpret_cast<const T*>(tile.blocks.k_of(first_column + column)); };
  const auto v_of = [&](int column) { return reinterpret_cast<const T*>(tile.blocks.v_of(first_column + column)); };

  const vfloat scale = splat(tile.scale_log2);
  for (int row = 0; row < rows; ++row) arrange<T>(tile.q + row * dim, dim, q + row * dim);
  for (int i = 0; i < rows * dim; i += LANES) store(q + i, load(q + i) * scale);
  for (int column = 0; column < num_columns; ++column) {
    const int start = column * block_tokens;
    // Whole fours: the block has them, and scores of slots that a row does not see are replaced.
    const int tokens = (num_tokens - start < block_tokens ? num_tokens - start + 3 : block_tokens) / 4 * 4;
    const T* k = k_of(column);
    const T* next = column + 1 < num_columns ? k_of(column + 1) : v_of(0);
    if (widens) {
      widen(reinterpret_cast<const uint16_t*>(k), reinterpret_cast<const uint16_t*>(next), tokens * dim, wide);
      score_block(q, rows, wide, wide, dim, tokens, scores + start, SCORES_STRIDE);
    } else {
      score_block(q, rows, k, next, dim, tokens, scores + start, SCORES_STRIDE);
    }
  }
  for (int row = 0; row < rows; ++row)
    soften_row(scores + row * SCORES_STRIDE, tile.visible_in_chunk(chunk, row), num_tokens, part.maximum + row,
               part.sum + row);
  __builtin_memset(part.out, 0, sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(dim));
  for (int column = 0; column < num_columns; ++column) {
    const int start = column * block_tokens;
    const int tokens = num_tokens - start < block_tokens ? num_tokens - start : block_tokens;
    const T* v = v_of(column);
    const T* next = v_of(column + 1 < num_columns ? column + 1 : column);
    if (widens) {
      widen(reinterpret_cast<const uint16_t*>(v), reinterpret_cast<const uint16_t*>(next), tokens * dim, wide);
      value_block(scores + start, SCORES_STRIDE, rows, wide, wide, dim, tokens, part.out);
    } else {
      value_block(scores + start, SCORES_STRIDE, rows, v, next, dim, tokens, part.out);
    }
  }
  for (int row = 0; row < rows; ++row) restore<T>(part.out + row * dim, dim);
}

}  // namespace

size_t portable_chunk_scratch_bytes(const Arena& arena) {
  const int64_t floats = static_cast<int64_t>(MAX_TILE_ROWS) * (SCORES_STRIDE + arena.head_dim) +
                         static_cast<int64_t>(arena.block_tokens) * arena.head_dim;
  return static_cast<size_t>(floats) * sizeof(float);
}

void portable_chunk(const Tile& tile, int32_t chunk, Part part, uint8_t* scratch) {
  float* memory = reinterpret_cast<float*>(scratch);
  if (tile.kv_dtype == Dtype::fp32) {
    run_chunk<float>(tile, chunk, part, memory);
  } else {
    run_chunk<uint16_t>(tile, chunk, part, memory);
  }
}

}  // namespace remora::REMORA_LEVEL
