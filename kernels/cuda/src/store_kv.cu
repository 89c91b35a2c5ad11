// Norms (optional) and rotates Q and K of a step's tokens, and stores K and V into their blocks, rounded or quantised.
//
// Macros: HEAD_DIM (multiple of 16, at most 256), K_FORMAT and V_FORMAT (of kv_codec.cuh), VALUE_TYPE (float or Bf16:
// of qkv and of the rotated queries). Rope is the half-rotation of Hugging Face: dim d turns with dim d + HEAD_DIM / 2.
#include "common.cuh"
#include "kv_codec.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = (HALF + 31) / 32;  // of a lane: pair lane, lane + 32, ...

// RMS norm over the head that a warp holds.
__device__ __forceinline__ void norm_head(float (&low)[PAIRS], float (&high)[PAIRS], const float* weight, float eps) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int i = 0; i < PAIRS; ++i) {
    sum = fmaf(low[i], low[i], sum);
    sum = fmaf(high[i], high[i], sum);
  }
  const float scale = rsqrtf(warp_sum(sum) / HEAD_DIM + eps);
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= HALF) continue;
    low[i] = low[i] * scale * weight[pair];
    high[i] = high[i] * scale * weight[pair + HALF];
  }
}

}  // namespace

// Grid: (tokens), THREADS threads; a warp does a head at a time. qkv [T][num_heads + 2 * num_kv_heads][HEAD_DIM] with
// queries first, then K, then V. Token t goes to slot slot_T[t] of block block_T[t], nowhere if that is negative (rows
// that only fill up a captured step); not_finite[sequence_T[t]] becomes 1 when its K or V has a value that the arena
// cannot hold. q_norm, k_norm [HEAD_DIM]: both or null. inv_freq [HALF]; cos and sin are multiplied by rope_factor.
extern "C" __global__ void __launch_bounds__(THREADS)
    store_kv(const VALUE_TYPE* qkv, const int* positions, const int* block_T, const int* slot_T, const int* sequence_T,
             const float* inv_freq, float rope_factor, const float* q_norm, const float* k_norm, float eps,
             VALUE_TYPE* q_out, uint8* not_finite, uint8* data, int64 layer_offset, int64 block_stride,
             int64 side_stride, int64 k_head_stride, int64 v_head_stride, int block_tokens, int num_heads,
             int num_kv_heads) {
  __shared__ __align__(16) float rows[WARPS][HEAD_DIM];
  const Place place{data, layer_offset, block_stride, side_stride, k_head_stride, v_head_stride};
  const int64 token = blockIdx.x;
  const int lane = threadIdx.x % 32, all_heads = num_heads + 2 * num_kv_heads;
  const int block = block_T[token], slot = slot_T[token];
  float* row = rows[threadIdx.x / 32];
  bool fits = true;
  float cosine[PAIRS], sine[PAIRS];
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + 32 * i;
    const float angle = pair < HALF ? static_cast<float>(positions[token]) * inv_freq[pair] : 0.0f;
    sincosf(angle, &sine[i], &cosine[i]);
    cosine[i] *= rope_factor;
    sine[i] *= rope_factor;
  }
  for (int head = threadIdx.x / 32; head < all_heads; head += WARPS) {
    const VALUE_TYPE* source = qkv + (token * all_heads + head) * HEAD_DIM;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    float low[PAIRS], high[PAIRS];
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = lane + 32 * i;
      low[i] = pair < HALF ? to_float(source[pair]) : 0.0f;
      high[i] = pair < HALF ? to_float(source[pair + HALF]) : 0.0f;
    }
    if (q_norm != nullptr && !is_value) norm_head(low, high, is_query ? q_norm : k_norm, eps);
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= HALF) continue;
      const float a = is_value ? low[i] : fmaf(-high[i], sine[i], low[i] * cosine[i]);
      const float b = is_value ? high[i] : fmaf(low[i], sine[i], high[i] * cosine[i]);
      if (is_query) {
        VALUE_TYPE* target = q_out + (token * num_heads + head) * HEAD_DIM;
        target[pair] = from_float<VALUE_TYPE>(a);
        target[pair + HALF] = from_float<VALUE_TYPE>(b);
      } else {
        row[pair] = a;
        row[pair + HALF] = b;
      }
    }
    if (is_query || block < 0) continue;
    if (is_value) {
      uint8* start = place.head(block, 1, head - num_heads - num_kv_heads);
      fits = encode_row<V_FORMAT>(row, {start, block_tokens}, slot) && fits;
    } else {
      uint8* start = place.head(block, 0, head - num_heads);
      fits = encode_row<K_FORMAT>(row, {start, block_tokens}, slot) && fits;
    }
  }
  if (!fits) not_finite[sequence_T[token]] = 1;
}
