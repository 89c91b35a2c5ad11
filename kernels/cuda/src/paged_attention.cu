// Paged attention over the arena in place: decode, chunked prefill and groups with common leading blocks in one routine.
//
// Macros: HEAD_DIM (multiple of 16, at most 128) · ROWS (query rows of a tile: 2, 4, 8 or 16) · KV_TYPE, VALUE_TYPE
// (float or Bf16: of the arena; of queries and outputs).
//
// A query row is a (token, head of the group of one kv head); it sees positions 0 up to its token's own. Positions are
// cut into chunks of CHUNK at absolute positions. Within a chunk: all scores, their maximum, exp2, the sum, then P·V in
// token order. Chunks are folded in ascending order. No step depends on which rows share a tile, on which block does
// which chunk, or on ROWS: a row has the same bits alone, in a batch, in a prompt cut anywhere and behind any split.
// Slots that a row does not see are never multiplied, so they may hold anything, NaN too.
#include "common.cuh"

namespace {

constexpr int CHUNK = 512;  // positions; as ATTENTION_CHUNK of the native kernels
constexpr int TILE = 64;    // tokens of K or V staged at once
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int HALF_ROWS = ROWS / 2;  // one half of the threads serves the first rows, the other half the rest
constexpr int VECTOR = 16 / static_cast<int>(sizeof(KV_TYPE));
// 16 bytes more than a row: threads that read the same dims of consecutive tokens hit different banks.
constexpr int TILE_STRIDE = HEAD_DIM + VECTOR;
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

struct Shared {
  __device__ explicit Shared(uint8* memory)
      : q(reinterpret_cast<float*>(memory)),
        p(q + ROWS * HEAD_DIM),
        maximum(p + ROWS * CHUNK),
        sum(maximum + ROWS),
        visible(reinterpret_cast<int*>(sum + ROWS)),
        token(visible + ROWS),
        tile(reinterpret_cast<KV_TYPE*>(token + ROWS)) {}

  float* q;        // [ROWS][HEAD_DIM]
  float* p;        // [ROWS][CHUNK] scores, then weights
  float* maximum;  // [ROWS]
  float* sum;      // [ROWS]
  int* visible;    // [ROWS] positions that the row sees; 0 for a row that is not there
  int* token;      // [ROWS]
  KV_TYPE* tile;   // [TILE][TILE_STRIDE]
};

// Stages TILE tokens from `first` on; those from `end` on are zero. No token beyond `end` is read.
__device__ __forceinline__ void load_tile(KV_TYPE* tile, const Place& place, const int* table, int block_shift,
                                          int side, int kv_head, int first, int end) {
  constexpr int PER_TOKEN = HEAD_DIM / VECTOR;
  for (int i = threadIdx.x; i < TILE * PER_TOKEN; i += THREADS) {
    const int token = i / PER_TOKEN, part = i % PER_TOKEN, position = first + token;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (position < end) {
      const int slot = position & ((1 << block_shift) - 1);
      const KV_TYPE* head = place.head<KV_TYPE>(table[position >> block_shift], side, kv_head);
      bits = *reinterpret_cast<const uint4*>(head + slot * HEAD_DIM + part * VECTOR);
    }
    *reinterpret_cast<uint4*>(tile + token * TILE_STRIDE + part * VECTOR) = bits;
  }
}

// Scores of one staged token for the rows of this half; four interleaved sums over the dims.
__device__ __forceinline__ void score_tile(const Shared& shared, int half, int first, int chunk_start,
                                           float scale_log2) {
  const int token = threadIdx.x % TILE, position = first + token;
  float sums[HALF_ROWS][4] = {};
  for (int d = 0; d < HEAD_DIM; d += 4) {
    const float4 k = load_four(shared.tile + token * TILE_STRIDE + d);
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) {
      const float4 q = load_four(shared.q + (half * HALF_ROWS + row) * HEAD_DIM + d);
      sums[row][0] = fmaf(q.x, k.x, sums[row][0]);
      sums[row][1] = fmaf(q.y, k.y, sums[row][1]);
      sums[row][2] = fmaf(q.z, k.z, sums[row][2]);
      sums[row][3] = fmaf(q.w, k.w, sums[row][3]);
    }
  }
#pragma unroll
  for (int row = 0; row < HALF_ROWS; ++row) {
    const int r = half * HALF_ROWS + row;
    const float dot = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
    shared.p[r * CHUNK + position - chunk_start] =
        position < shared.visible[r] ? dot * scale_log2 : negative_infinity();
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

// out[row] += Σ p · v over the staged tokens, in token order, for two dims and the rows of this half.
__device__ __forceinline__ void value_tile(const Shared& shared, int half, int pair, int first, int chunk_start,
                                           bool all_visible, float (&out)[HALF_ROWS][2]) {
  const KV_TYPE* values = shared.tile + 2 * pair;
  const float* weights = shared.p + half * HALF_ROWS * CHUNK + first - chunk_start;
  if (all_visible) {
    for (int token = 0; token < TILE; token += 4) {
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = load_two(values + (token + i) * TILE_STRIDE);
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
    const float2 v = load_two(values + token * TILE_STRIDE);
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
                    int64 head_stride, int block_shift, int num_heads, int group, float scale_log2) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  const Place place{data, layer_offset, block_stride, side_stride, head_stride};
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

  const int half = threadIdx.x / TILE, pair = threadIdx.x % TILE;
  int half_visible = tile_visible;  // what every row of this half sees
  for (int row = 0; row < HALF_ROWS; ++row)
    if (half * HALF_ROWS + row < item.num_rows) half_visible = min(half_visible, shared.visible[half * HALF_ROWS + row]);
  Running running[HALF_ROWS];
  float result[HALF_ROWS][2] = {};
  for (int row = 0; row < HALF_ROWS; ++row) running[row] = {negative_infinity(), 0.0f};

  for (int chunk = item.first_chunk; chunk < end_chunk; ++chunk) {
    const int start = chunk * CHUNK, end = min(start + CHUNK, tile_visible);
    const int num_tiles = (end - start + TILE - 1) / TILE;
    for (int tile = 0; tile < num_tiles; ++tile) {
      __syncthreads();  // the tile and, in the first round, q, p and sums
      load_tile(shared.tile, place, table, block_shift, 0, kv_head, start + tile * TILE, end);
      __syncthreads();
      score_tile(shared, half, start + tile * TILE, start, scale_log2);
    }
    __syncthreads();
    weigh(shared, num_tiles * TILE);
    float values[HALF_ROWS][2] = {};
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int first = start + tile * TILE;
      if (tile > 0) __syncthreads();
      load_tile(shared.tile, place, table, block_shift, 1, kv_head, first, end);
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
  if (item.writes_parts || 2 * pair >= HEAD_DIM) return;
#pragma unroll
  for (int row = 0; row < HALF_ROWS; ++row) {
    const int r = half * HALF_ROWS + row;
    if (r >= item.num_rows) continue;
    const int64 head = static_cast<int64>(shared.token[r]) * num_heads + kv_head * group + (item.first_row + r) % group;
    const float inverse = running[row].sum == 0.0f ? 0.0f : 1.0f / running[row].sum;
    for (int i = 0; i < 2; ++i) out[head * HEAD_DIM + 2 * pair + i] = from_float<VALUE_TYPE>(result[row][i] * inverse);
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
  out[row * HEAD_DIM + d] = from_float<VALUE_TYPE>(result * inverse);
  if (d == 0) lse[row] = natural_log_sum(running);
}
