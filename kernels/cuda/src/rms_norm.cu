// RMS norm of rows in fp32, with the addition before it. Macros: VALUE_TYPE.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;

}  // namespace

// Grid: (rows), THREADS threads. residual (fp32, may be null) += x, in place; out = norm(residual or x) * weight.
// Sums are over dims congruent modulo THREADS first, then over the threads as a tree: the same for every row.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const VALUE_TYPE* x, const float* weight, float* residual, VALUE_TYPE* out, int size, float eps) {
  __shared__ float sums[THREADS];
  const int64 start = static_cast<int64>(blockIdx.x) * size;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < size; i += THREADS) {
    float value = to_float(x[start + i]);
    if (residual != nullptr) residual[start + i] = value = residual[start + i] + value;
    sum = fmaf(value, value, sum);
  }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  const float scale = rsqrtf(sums[0] / size + eps);
  for (int i = threadIdx.x; i < size; i += THREADS) {
    const float value = residual != nullptr ? residual[start + i] : to_float(x[start + i]);
    out[start + i] = from_float<VALUE_TYPE>(value * scale * weight[i]);
  }
}
