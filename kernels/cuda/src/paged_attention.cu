// Paged attention over the arena in place: decode, chunked prefill, groups with common leading blocks in one routine.
//
// Macros: HEAD_DIM (multiple of 16, at most 128) · ROWS (query rows of a tile: 2, 4, 8 or 16) · K_FORMAT, V_FORMAT (of
// kv_codec.cuh) · VALUE_TYPE (float or Bf16: of queries and outputs).
//
// A query row is a (token, head of the group of one kv head); it sees positions 0 up to its token's own. Positions are
// cut into chunks of CHUNK at absolute positions. Within a chunk: all scores, their maximum, exp2, the sum, then P·V in
// token order. Chunks are folded in ascending order. No step depends on which rows share a tile, on which block does
// which chunk, or on ROWS: a row has the same bits alone, in a batch, in a prompt cut anywhere and behind any split.
// Slots that a row does not see are never multiplied, so they may hold anything, NaN too.
//
// Quantised rows are staged as they are and widened where they are multiplied. A rotated K meets a rotated query; a
// rotated V gives a rotated result, which is turned back once, behind the last chunk.
#include "common.cuh"
#include "kv_codec.cuh"

namespace {

constexpr int CHUNK = 512;  // positions; as ATTENTION_CHUNK of the native kernels
constexpr int TILE = 64;    // tokens of K or V staged at once
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int HALF_ROWS = ROWS / 2;  // one half of the threads serves the first rows, the other half the rest
constexpr int MAX_SCALES = K_FORMAT::NUM_SCALES > V_FORMAT::NUM_SCALES ? K_FORMAT::NUM_SCALES : V_FORMAT::NUM_SCALES;
constexpr int PART_FLOATS = HEAD_DIM + 2;  // a chunk's output before division, its maximum and its sum
constexpr float LN_2 = 0.693147180559945309f;

// One row of `items`; kernels/cuda/attention_plan.py fills it.
struct Item {
  int table_row;               // of block_table
  int first_row, num_rows;     // row r is head r % group of token row_token[r / group]; at most ROWS
  int first_chunk, end_chunk;  // what the block computes, as far as the rows see it
  int writes_parts;            // 0: the item has all chunks of its rows and writes the result
  int unused_0, unused_1;
};

// Attention over some positions before division: Σ 2^(score - maximum) · v and Σ 2^(score - maximum).
struct Running {
  float maximum, sum;
};

__device__ __forceinline__ float weight(float maximum, float joint) {
  return maximum == negative_infinity() ? 0.0f : exp2f(maximum - joint);
}

// Joins a chunk to what was before it; outputs become old * keep + chunk * take.
__device__ __forceinline__ void fold(Running& running, float maximum, float sum, float& keep, float& take) {
  const float joint = fmaxf(running.maximum, maximum);
  keep = weight(running.maximum, joint);
  take = weight(maximum, joint);
  running.sum = fmaf(running.sum, keep, sum * take);
  running.maximum = joint;
}

__device__ __forceinline__ float natural_log_sum(Running running) {
  return running.sum == 0.0f ? negative_infinity() : (running.maximum + log2f(running.sum)) * LN_2;
}

// Rows are staged in units of 16 bytes where they have whole ones, else of 8.
template <class Format>
struct Staging {
  using Unit = typename Pick<Format::ROW_BYTES % 16 == 0, uint4, uint2>::Type;
  static constexpr int UNITS = Format::ROW_BYTES / static_cast<int>(sizeof(Unit));
  // An odd number of units: threads that read the same dims of consecutive tokens hit different banks.
  static constexpr int STRIDE = (UNITS | 1) * static_cast<int>(sizeof(Unit));
};

struct Shared {
  __device__ explicit Shared(uint8* memory)
      : q(reinterpret_cast<float*>(memory)),
        p(q + ROWS * HEAD_DIM),
        maximum(p + ROWS * CHUNK),
        sum(maximum + ROWS),
        visible(reinterpret_cast<int*>(sum + ROWS)),
        token(visible + ROWS),
        scales(reinterpret_cast<float*>(token + ROWS)),
        tile(reinterpret_cast<uint8*>(scales + TILE * MAX_SCALES)) {}

  float* q;        // [ROWS][HEAD_DIM]; at the end the result, where it is rotated
  float* p;        // [ROWS][CHUNK] scores, then weights
  float* maximum;  // [ROWS]
  float* sum;      // [ROWS]
  int* visible;    // [ROWS] positions that the row sees; 0 for a row that is not there
  int* token;      // [ROWS]
  float* scales;   // [TILE][NUM_SCALES]
  uint8* tile;     // [TILE][STRIDE]
};

// Stages TILE tokens from `first` on; those from `end` on are zero. No token beyond `end` is read.
template <class Format>
__device__ __forceinline__ void load_tile(const Shared& shared, const Place& place, const int* table, int block_shift,
                                          int side, int kv_head, int first, int end) {
  using Staged = Staging<Format>;
  using Unit = typename Staged::Unit;
  const int block_tokens = 1 << block_shift;
  for (int i = threadIdx.x; i < TILE * Staged::UNITS; i += THREADS) {
    const int token = i / Staged::UNITS, part = i % Staged::UNITS, position = first + token;
    Unit bits = {};
    if (position < end) {
      const HeadRows<Format> head{place.head(table[position >> block_shift], side, kv_head), block_tokens};
      bits = reinterpret_cast<const Unit*>(head.row(position & (block_tokens - 1)))[part];
    }
    reinterpret_cast<Unit*>(shared.tile + token * Staged::STRIDE)[part] = bits;
  }
  if constexpr (Format::NUM_SCALES > 0) {
    for (int i = threadIdx.x; i < TILE * Format::NUM_SCALES; i += THREADS) {
      const int position = first + i / Format::NUM_SCALES, group = i % Format::NUM_SCALES;
      float scale = 0.0f;
      if (position < end) {
        const HeadRows<Format> head{place.head(table[position >> block_shift], side, kv_head), block_tokens};
        scale = to_float(head.scales(position & (block_tokens - 1))[group]);
      }
      shared.scales[i] = scale;
    }
  }
}

// Scores of one staged token for the rows of this half: four interleaved sums in each group of dims with one scale.
__device__ __forceinline__ void score_tile(const Shared& shared, int half, int first, int chunk_start,
                                           float scale_log2) {
  const int token = threadIdx.x % TILE, position = first + token;
  const uint8* k = shared.tile + token * Staging<K_FORMAT>::STRIDE;
  float dots[HALF_ROWS] = {};
  for (int group = 0; group < HEAD_DIM; group += K_FORMAT::GROUP) {
    float sums[HALF_ROWS][4] = {};
    for (int d = group; d < min(group + K_FORMAT::GROUP, HEAD_DIM); d += K_FORMAT::STEP) {
      float keys[K_FORMAT::STEP];
      K_FORMAT::load(k, d, keys);
#pragma unroll
      for (int i = 0; i < K_FORMAT::STEP; i += 4) {
#pragma unroll
        for (int row = 0; row < HALF_ROWS; ++row) {
          const float4 q = load_four(shared.q + (half * HALF_ROWS + row) * HEAD_DIM + d + i);
          sums[row][0] = fmaf(q.x, keys[i], sums[row][0]);
          sums[row][1] = fmaf(q.y, keys[i + 1], sums[row][1]);
          sums[row][2] = fmaf(q.z, keys[i + 2], sums[row][2]);
          sums[row][3] = fmaf(q.w, keys[i + 3], sums[row][3]);
        }
      }
    }
    float scale = 1.0f;
    if constexpr (K_FORMAT::NUM_SCALES > 0)
      scale = shared.scales[token * K_FORMAT::NUM_SCALES + group / K_FORMAT::GROUP];
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) {
      const float sum = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
      dots[row] = K_FORMAT::NUM_SCALES > 0 ? fmaf(sum, scale, dots[row]) : sum;
    }
  }
#pragma unroll
  for (int row = 0; row < HALF_ROWS; ++row) {
    const int r = half * HALF_ROWS + row;
    shared.p[r * CHUNK + position - chunk_start] =
        position < shared.visible[r] ? dots[row] * scale_log2 : negative_infinity();
  }
}

// Scores become weights; each warp does whole rows.
__device__ __forceinline__ void weigh(const Shared& shared, int count) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
    float* p = shared.p + r * CHUNK;
    float maximum = negative_infinity();
    for (int i = lane; i < count; i += 32) maximum = fmaxf(maximum, p[i]);
    maximum = warp_max(maximum);
    const float base = maximum == negative_infinity() ? 0.0f : maximum;
    float sum = 0.0f;
    for (int i = lane; i < count; i += 32) {
      p[i] = exp2f(p[i] - base);
      sum += p[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      shared.maximum[r] = maximum;
      shared.sum[r] = sum;
    }
  }
}

// Two dims of a staged token of V.
__device__ __forceinline__ float2 staged_value(const Shared& shared, int token, int pair) {
  float2 v = V_FORMAT::two(shared.tile + token * Staging<V_FORMAT>::STRIDE, 2 * pair);
  if constexpr (V_FORMAT::NUM_SCALES > 0) {
    const float scale = shared.scales[token * V_FORMAT::NUM_SCALES + 2 * pair / V_FORMAT::GROUP];
    v.x *= scale, v.y *= scale;
  }
  return v;
}

// out[row] += Σ p · v over the staged tokens, in token order, for two dims and the rows of this half.
__device__ __forceinline__ void value_tile(const Shared& shared, int half, int pair, int first, int chunk_start,
                                           bool all_visible, float (&out)[HALF_ROWS][2]) {
  const float* weights = shared.p + half * HALF_ROWS * CHUNK + first - chunk_start;
  if (all_visible) {
    for (int token = 0; token < TILE; token += 4) {
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = staged_value(shared, token + i, pair);
#pragma unroll
      for (int row = 0; row < HALF_ROWS; ++row) {
        const float4 p = load_four(weights + row * CHUNK + token);
        const float each[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[row][0] = fmaf(each[i], v[i].x, out[row][0]);
          out[row][1] = fmaf(each[i], v[i].y, out[row][1]);
        }
      }
    }
    return;
  }
  for (int token = 0; token < TILE; ++token) {
    const float2 v = staged_value(shared, token, pair);
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) {
      if (first + token >= shared.visible[half * HALF_ROWS + row]) continue;  // 0 · NaN is NaN
      const float p = weights[row * CHUNK + token];
      out[row][0] = fmaf(p, v.x, out[row][0]);
      out[row][1] = fmaf(p, v.y, out[row][1]);
    }
  }
}

}  // namespace

// Grid: (items, kv heads), THREADS threads. q, out [T][num_heads][HEAD_DIM]; lse [T][num_heads], natural log.
// parts [slots][num_heads][PART_FLOATS]: the part of chunk c of token t is in slot part_index[t] + c.
extern "C" __global__ void __launch_bounds__(THREADS)
    paged_attention(const Item* items, const int* row_token, const int* positions, const int* block_table,
                    int64 table_stride, const VALUE_TYPE* q, VALUE_TYPE* out, float* lse, float* parts,
                    const int* part_index, uint8* data, int64 layer_offset, int64 block_stride, int64 side_stride,
                    int64 k_head_stride, int64 v_head_stride, int block_shift, int num_heads, int group,
                    float scale_log2) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  const Place place{data, layer_offset, block_stride, side_stride, k_head_stride, v_head_stride};
  const Item item = items[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int* table = block_table + item.table_row * table_stride;

  if (threadIdx.x < ROWS) {
    const int r = threadIdx.x;
    const int token = r < item.num_rows ? row_token[(item.first_row + r) / group] : 0;
    shared.token[r] = token;
    shared.visible[r] = r < item.num_rows ? positions[token] + 1 : 0;
  }
  __syncthreads();
  int tile_visible = 0;
  for (int r = 0; r < item.num_rows; ++r) tile_visible = max(tile_visible, shared.visible[r]);
  const int end_chunk = min(item.end_chunk, (tile_visible + CHUNK - 1) / CHUNK);
  if (item.first_chunk >= end_chunk && item.writes_parts) return;

  for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
    const int r = i / HEAD_DIM, d = i % HEAD_DIM;
    const int64 head = static_cast<int64>(shared.token[r]) * num_heads + kv_head * group + (item.first_row + r) % group;
    shared.q[i] = r < item.num_rows ? to_float(q[head * HEAD_DIM + d]) : 0.0f;
  }
  if (K_FORMAT::ROTATED) rotate_rows<BlockTeam>(shared.q, ROWS);

  const int half = threadIdx.x / TILE, pair = threadIdx.x % TILE;
  int half_visible = tile_visible;  // what every row of this half sees
  for (int r = half * HALF_ROWS; r < min((half + 1) * HALF_ROWS, item.num_rows); ++r)
    half_visible = min(half_visible, shared.visible[r]);
  Running running[HALF_ROWS];
  float result[HALF_ROWS][2] = {};
  for (int row = 0; row < HALF_ROWS; ++row) running[row] = {negative_infinity(), 0.0f};

  for (int chunk = item.first_chunk; chunk < end_chunk; ++chunk) {
    const int start = chunk * CHUNK, end = min(start + CHUNK, tile_visible);
    const int num_tiles = (end - start + TILE - 1) / TILE;
    for (int tile = 0; tile < num_tiles; ++tile) {
      __syncthreads();  // the tile and, in the first round, q, p and sums
      load_tile<K_FORMAT>(shared, place, table, block_shift, 0, kv_head, start + tile * TILE, end);
      __syncthreads();
      score_tile(shared, half, start + tile * TILE, start, scale_log2);
    }
    __syncthreads();
    weigh(shared, num_tiles * TILE);
    float values[HALF_ROWS][2] = {};
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int first = start + tile * TILE;
      if (tile > 0) __syncthreads();
      load_tile<V_FORMAT>(shared, place, table, block_shift, 1, kv_head, first, end);
      __syncthreads();
      if (2 * pair < HEAD_DIM) value_tile(shared, half, pair, first, start, first + TILE <= half_visible, values);
    }
    if (2 * pair >= HEAD_DIM) continue;
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) {
      const int r = half * HALF_ROWS + row;
      if (shared.visible[r] <= start) continue;
      if (item.writes_parts) {
        const int64 slot = part_index[shared.token[r]] + chunk;
        const int head = kv_head * group + (item.first_row + r) % group;
        float* part = parts + (slot * num_heads + head) * PART_FLOATS;
        part[2 * pair] = values[row][0];
        part[2 * pair + 1] = values[row][1];
        if (pair == 0) {
          part[HEAD_DIM] = shared.maximum[r];
          part[HEAD_DIM + 1] = shared.sum[r];
        }
      } else {
        float keep, take;
        fold(running[row], shared.maximum[r], shared.sum[r], keep, take);
        for (int i = 0; i < 2; ++i) result[row][i] = fmaf(result[row][i], keep, values[row][i] * take);
      }
    }
  }
  if (item.writes_parts) return;
  if (V_FORMAT::ROTATED) __syncthreads();  // the last use of q
#pragma unroll
  for (int row = 0; row < HALF_ROWS; ++row) {
    const float inverse = running[row].sum == 0.0f ? 0.0f : 1.0f / running[row].sum;
    for (int i = 0; i < 2; ++i) {
      result[row][i] *= inverse;
      if (V_FORMAT::ROTATED && 2 * pair < HEAD_DIM)
        shared.q[(half * HALF_ROWS + row) * HEAD_DIM + 2 * pair + i] = result[row][i];
    }
  }
  if (V_FORMAT::ROTATED) rotate_rows<BlockTeam>(shared.q, ROWS);
  if (2 * pair >= HEAD_DIM) return;
#pragma unroll
  for (int row = 0; row < HALF_ROWS; ++row) {
    const int r = half * HALF_ROWS + row;
    if (r >= item.num_rows) continue;
    const int64 head = static_cast<int64>(shared.token[r]) * num_heads + kv_head * group + (item.first_row + r) % group;
    for (int i = 0; i < 2; ++i) {
      const float value = V_FORMAT::ROTATED ? shared.q[r * HEAD_DIM + 2 * pair + i] : result[row][i];
      out[head * HEAD_DIM + 2 * pair + i] = from_float<VALUE_TYPE>(value);
    }
    if (pair == 0) lse[head] = natural_log_sum(running[row]);
  }
}

// Folds the parts of tokens that were split, chunk by chunk. Grid: (tokens, query heads), HEAD_DIM threads.
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    merge_chunks(const int* tokens, const int* positions, const float* parts, const int* part_index, VALUE_TYPE* out,
                 float* lse, int num_heads) {
  const int token = tokens[blockIdx.x], head = blockIdx.y, d = threadIdx.x;
  const int num_chunks = positions[token] / CHUNK + 1;
  Running running{negative_infinity(), 0.0f};
  float result = 0.0f;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const float* part = parts + (static_cast<int64>(part_index[token] + chunk) * num_heads + head) * PART_FLOATS;
    float keep, take;
    fold(running, part[HEAD_DIM], part[HEAD_DIM + 1], keep, take);
    result = fmaf(result, keep, part[d] * take);
  }
  const int64 row = static_cast<int64>(token) * num_heads + head;
  const float inverse = running.sum == 0.0f ? 0.0f : 1.0f / running.sum;
  result *= inverse;
  if constexpr (V_FORMAT::ROTATED) {
    __shared__ float rotated[HEAD_DIM];
    rotated[d] = result;
    rotate_rows<BlockTeam>(rotated, 1);
    result = rotated[d];
  }
  out[row * HEAD_DIM + d] = from_float<VALUE_TYPE>(result);
  if (d == 0) lse[row] = natural_log_sum(running);
}
