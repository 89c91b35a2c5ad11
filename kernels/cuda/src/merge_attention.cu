// Joins attention over two disjoint sets of positions by their log-sum-exp. Macros: HEAD_DIM, VALUE_TYPE.
#include "common.cuh"

// Grid: (rows), HEAD_DIM threads. Rows are (token, query head); lse is natural; a set without positions has LSE -inf.
// out may be out_a, and lse lse_a.
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    merge_attention(const VALUE_TYPE* out_a, const float* lse_a, const VALUE_TYPE* out_b, const float* lse_b,
                    VALUE_TYPE* out, float* lse) {
  const int64 row = blockIdx.x, i = row * HEAD_DIM + threadIdx.x;
  const float a = lse_a[row], b = lse_b[row];
  const float joint = fmaxf(a, b);
  __syncthreads();  // lse may be lse_a
  const float weight_a = a == negative_infinity() ? 0.0f : expf(a - joint);
  const float weight_b = b == negative_infinity() ? 0.0f : expf(b - joint);
  const float sum = weight_a + weight_b, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float value = fmaf(to_float(out_a[i]), weight_a, to_float(out_b[i]) * weight_b);
  out[i] = from_float<VALUE_TYPE>(value * inverse);
  if (threadIdx.x == 0) lse[row] = sum == 0.0f ? negative_infinity() : joint + logf(sum);
}
