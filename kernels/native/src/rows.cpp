#include "rows.h"

namespace remora::REMORA_LEVEL {
namespace {

// log_sum_exp_row sums pieces of this length first, which keeps the error of a long fp32 sum small.
constexpr int64_t SUM_PIECE = 1024;

}  // namespace

void rms_norm_row(const float* x, const float* weight, int64_t count, float eps, float* out) {
  vfloat squares = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (int64_t tail = i; tail < count; ++tail) total += x[tail] * x[tail];
  const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(count) + eps);
  for (i = 0; i + LANES <= count; i += LANES) store(out + i, load(x + i) * splat(scale) * load(weight + i));
  for (; i < count; ++i) out[i] = x[i] * scale * weight[i];
}

void rope_head(float* head, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vfloat low = load(head + i), high = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, low * c - high * s);
    store(head + half + i, high * c + low * s);
  }
  for (; i < half; ++i) {
    const float low = head[i], high = head[half + i];
    head[i] = low * cos[i] - high * sin[i];
    head[half + i] = high * cos[i] + low * sin[i];
  }
}

int32_t argmax_row(const float* x, int64_t count, float* maximum) {
  vfloat largest = splat(x[0]), poison = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const vfloat v = load(x + i);
    largest = max(v, largest);
    poison = v == v ? poison : v;
  }
  float best = max(largest);
  bool invalid = !(sum(poison) == 0.0f);
  for (; i < count; ++i) {
    best = x[i] > best ? x[i] : best;
    invalid |= x[i] != x[i];
  }
  *maximum = best;
  if (invalid) return -1;
  for (i = 0; i + LANES <= count; i += LANES) {
    const vint hit = load(x + i) == splat(best);
    int32_t lanes[LANES], any = 0;
    store_as(lanes, hit);
    for (int lane = 0; lane < LANES; ++lane) any |= lanes[lane];
    if (any != 0) break;
  }
  while (i < count && x[i] != best) ++i;
  return static_cast<int32_t>(i);
}

float log_sum_exp_row(const float* x, int64_t count) {
  float maximum;
  if (argmax_row(x, count, &maximum) < 0) return __builtin_nanf("");
  if (maximum - maximum != 0.0f) return maximum;  // an infinity, of either sign
  double total = 0.0;
  int64_t i = 0;
  while (i + LANES <= count) {
    vfloat piece = {};
    const int64_t end = i + SUM_PIECE < count ? i + SUM_PIECE : count;
    for (; i + LANES <= end; i += LANES) piece += exp(load(x + i) - splat(maximum));
    total += static_cast<double>(sum(piece));
  }
  for (; i < count; ++i) {
    float lanes[LANES];
    store(lanes, exp(splat(x[i] - maximum)));
    total += static_cast<double>(lanes[0]);
  }
  return maximum + static_cast<float>(__builtin_log(total));
}

void weigh_row(const float* x, int64_t count, float maximum, float factor, float* out, float* piece_sums) {
  constexpr int WIDTH = 16;  // partial sums of a piece: as many as the widest level has lanes
  const vfloat largest = splat(maximum), scale = splat(factor);
  for (int64_t begin = 0; begin < count; begin += WEIGHT_PIECE) {
    const int64_t end = begin + WEIGHT_PIECE < count ? begin + WEIGHT_PIECE : count;
    vfloat partial[WIDTH / LANES] = {};
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) {
      for (int v = 0; v < WIDTH / LANES; ++v) {
        const vfloat weight = exp((load(x + i + v * LANES) - largest) * scale);
        store(out + i + v * LANES, weight);
        partial[v] += weight;
      }
    }
    float sums[WIDTH];
    for (int v = 0; v < WIDTH / LANES; ++v) store(sums + v * LANES, partial[v]);
    for (int half = WIDTH / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    for (; i < end; ++i) {
      float lanes[LANES];
      store(lanes, exp((splat(x[i]) - largest) * scale));
      out[i] = lanes[0];
      sums[0] += lanes[0];
    }
    piece_sums[begin / WEIGHT_PIECE] = sums[0];
  }
}

}  // namespace remora::REMORA_LEVEL
