// Operations on single rows of fp32. The order of their sums depends on nothing but the row's length and the level.
#pragma once
#include "simd.h"

namespace remora::REMORA_LEVEL {

// out = x / sqrt(mean(x²) + eps) * weight. `out` may be `x`.
void rms_norm_row(const float* x, const float* weight, int64_t count, float eps, float* out);

// Rotates one head in place as Hugging Face does: value i with value i + head_dim / 2. cos and sin hold head_dim / 2
// values of the row's position.
void rope_head(float* head, const float* cos, const float* sin, int64_t head_dim);

// Index of the first maximum, and the maximum; -1 when a value is NaN.
int32_t argmax_row(const float* x, int64_t count, float* maximum);

// log of the sum of exp(x); NaN when a value is NaN.
float log_sum_exp_row(const float* x, int64_t count);

// out = exp((x - maximum) * factor), and the sum of every WEIGHT_PIECE of it, the last one shorter. Sums are in the
// same order at every level.
constexpr int64_t WEIGHT_PIECE = 256;
void weigh_row(const float* x, int64_t count, float maximum, float factor, float* out, float* piece_sums);

}  // namespace remora::REMORA_LEVEL
