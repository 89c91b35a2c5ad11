// Activations in groups of INPUT_GROUP values that share a scale: linear_grouped.h says why they are what they are.
#include "encodings.h"
#include "linear_grouped.h"

namespace remora::REMORA_LEVEL {
namespace {

constexpr int GROUP_VECTORS = INPUT_GROUP / LANES;

// The values of a group, zeros behind the last one of the row.
struct Group {
  vfloat values[GROUP_VECTORS];

  REMORA_INLINE_MEMBER Group(const float* x, int64_t num_in, int64_t index) {
    const int64_t k = index * INPUT_GROUP;
    for (int v = 0; v < GROUP_VECTORS; ++v) {
      const int64_t left = num_in - k - v * LANES;
      values[v] = left >= LANES ? load(x + k + v * LANES)
                                : load_partial(x + k + (left > 0 ? v * LANES : 0), left > 0 ? left : 0);
    }
  }

  // NaN where a value is not finite.
  REMORA_INLINE_MEMBER float largest() const {
    vint bits = {};
    for (int v = 0; v < GROUP_VECTORS; ++v) {
      const vint magnitude = (vint)abs(values[v]);
      bits = magnitude > bits ? magnitude : bits;
    }
    const int32_t most = fold(bits, [](vint a, vint b) { return a > b ? a : b; });
    float result;
    __builtin_memcpy(&result, &most, 4);
    return most < 0x7f800000 ? result : __builtin_nanf("");
  }

  // Codes of a step, whose inverse is given, and their sum.
  REMORA_INLINE_MEMBER int32_t codes(float inverse_step, vint* out) const {
    const vfloat inverse = splat(inverse_step);
    vint total = {};
    for (int v = 0; v < GROUP_VECTORS; ++v) total += out[v] = round_to_int(values[v] * inverse);
    return sum(total);
  }
};

}  // namespace

#if REMORA_VNNI && !REMORA_TILES
namespace {

// A value is an outlier that is more than this many times as large as the mean of its row; docs/precision.md has what
// other ratios cost. By what a mean is, that is no more than one value of so many.
constexpr float OUTLIER_RATIO = 5.5f;
static_assert(OUTLIER_RATIO >= 1.01f * MOST_OUTLIERS, "room for all outliers, also where the ratio is rounded");
constexpr float MOST_CODE = 127.0f;
// Rows whose values are all smaller become zeros: the reciprocal of their step would overflow.
constexpr float SMALLEST_LIMIT = 0x1p-90f;
// Steps of a group that is all but zero: 2 * 2^LEAST_EXPONENT of the row's.
constexpr int LEAST_EXPONENT = -20;
constexpr int64_t MOST_SUMS = 65535;
// Added and taken away again, it rounds to nearest even.
constexpr float ROUNDING = 12582912.0f;

typedef int8_t vbytes __attribute__((vector_size(LANES), may_alias));

// Bit i: lane i is larger.
REMORA_INLINE uint32_t lanes_above(vfloat v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)splat(limit), _CMP_GT_OQ);
#else
  uint32_t result = 0;
  for (int lane = 0; lane < LANES; ++lane) result |= (v[lane] > limit ? 1u : 0u) << lane;
  return result;
#endif
}

// The smallest 2^high + 2^low not below `share`, which is not negative, with high - low of 0 to 3.
struct TwoPowers {
  int high, low;

  REMORA_INLINE_MEMBER explicit TwoPowers(float share) {
    const uint32_t bits = bits_of(share), mantissa = bits & 0x7fffff;
    high = static_cast<int>(bits >> 23) - 127;
    low = high - (mantissa > 0x400000 ? 0 : mantissa > 0x200000 ? 1 : mantissa > 0x100000 ? 2 : 3);
    if (mantissa == 0) low = --high;
    if (high <= LEAST_EXPONENT) high = low = LEAST_EXPONENT;
  }
  REMORA_INLINE_MEMBER float value() const {
    return float_of(static_cast<uint32_t>(high + 127) << 23) + float_of(static_cast<uint32_t>(low + 127) << 23);
  }
};

// The sums of a row's groups as codes. Their magnitudes add up to less than 2^16, so that their products with 15 bits
// do not exceed 32.
REMORA_INLINE void encode_sums(const GroupScale* scale, int64_t groups, const RowParts& row) {
  float largest = 0, all = 0;
  for (int64_t index = 0; index < groups; ++index) {
    const float magnitude = __builtin_fabsf(scale[index].scaled_sum);
    largest = magnitude > largest ? magnitude : largest;
    all += magnitude;
  }
  const float by_all = all / static_cast<float>(MOST_SUMS - groups), by_largest = largest / 32767.0f;
  const float least = by_all > by_largest ? by_all : by_largest;
  // The power of two that is not below it.
  const float step = least > 0 ? float_of((bits_of(least) + 0x7fffff) & 0xff800000u) : 1.0f, inverse = 1.0f / step;
  row.row->sum_step = step;
  for (int64_t index = 0; index < groups; ++index)
    row.sums[index] = static_cast<int16_t>(scale[index].scaled_sum * inverse + ROUNDING - ROUNDING);
  if (groups % 2 != 0) row.sums[groups] = 0;
}

}  // namespace

void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales) {
  const int64_t groups = num_groups(num_in);
  auto* scale = reinterpret_cast<GroupScale*>(scales);
  const RowParts more = parts_of(scales, groups);
  vfloat magnitudes[GROUP_VECTORS] = {};
  for (int64_t index = 0; index < groups; ++index) {
    const Group group(x, num_in, index);
    scale[index].scale = group.largest();
    for (int v = 0; v < GROUP_VECTORS; ++v) magnitudes[v] += abs(group.values[v]);
  }
  for (int v = 1; v < GROUP_VECTORS; ++v) magnitudes[0] += magnitudes[v];
  // Of eight bits, so that a sum in another order gives the same.
  const float mean = sum(magnitudes[0]) / static_cast<float>(num_in);
  const float limit = float_of(bits_of(OUTLIER_RATIO * mean) & 0xffff0000u);
  const bool is_finite = limit < __builtin_inff(), is_zero = is_finite && limit < SMALLEST_LIMIT;
  *more.row = {is_zero ? 0.0f : is_finite ? limit / MOST_CODE : __builtin_nanf(""), 0, 0};
  if (is_zero || !is_finite) {
    __builtin_memset(out, 0, static_cast<size_t>(groups * INPUT_GROUP));
    for (int64_t index = 0; index < groups; ++index) scale[index] = {LEAST_EXPONENT, LEAST_EXPONENT, 0, 0};
    encode_sums(scale, groups, more);
    return;
  }
  const float inverse = MOST_CODE / limit, inverse_limit = 1.0f / limit;
  int32_t count = 0;
  for (int64_t index = 0; index < groups; ++index) {
    Group group(x, num_in, index);
    float largest = scale[index].scale, outliers = 0;
    if (largest > limit) {
      for (int v = 0; v < GROUP_VECTORS; ++v) {
        const vfloat magnitude = abs(group.values[v]);
        for (uint32_t lanes = lanes_above(magnitude, limit); lanes != 0; lanes &= lanes - 1) {
          const int64_t input = index * INPUT_GROUP + v * LANES + __builtin_ctz(lanes);
          const float steps = x[input] * inverse;
          more.outliers[count++] = {static_cast<int32_t>(input), steps};
          outliers += steps;
        }
        group.values[v] = magnitude > splat(limit) ? vfloat{} : group.values[v];
      }
      largest = group.largest();
    }
    const TwoPowers step(largest * inverse_limit);
    vint codes[GROUP_VECTORS];
    const int32_t total = group.codes(inverse / step.value(), codes);
    for (int v = 0; v < GROUP_VECTORS; ++v)
      store_as(out + index * INPUT_GROUP + v * LANES, __builtin_convertvector(codes[v], vbytes));
    scale[index] = {static_cast<float>(step.high), static_cast<float>(step.low),
                    static_cast<float>(total) * step.value() + outliers, -128 * total};
  }
  more.row->num_outliers = count;
  encode_sums(scale, groups, more);
}

#else

void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales) {
  typedef int16_t vhalf_ints __attribute__((vector_size(REMORA_VECTOR_BYTES / 2), may_alias));
  auto* scale = reinterpret_cast<GroupScale*>(scales);
  for (int64_t index = 0; index < num_groups(num_in); ++index, ++scale) {
    const Group group(x, num_in, index);
    const float step = group.largest() / 32767.0f;
    vint codes[GROUP_VECTORS];
    const int32_t total = group.codes(step > 0x1p-120f ? 1.0f / step : 0.0f, codes);
    auto* halves = reinterpret_cast<int16_t*>(out) + index * INPUT_GROUP;
    for (int v = 0; v < GROUP_VECTORS; ++v) {
      // In each four the order in which the kernel takes them as pairs.
      vhalf_ints ordered = __builtin_convertvector(codes[v], vhalf_ints);
#if REMORA_VECTOR_BYTES == 16
      ordered = __builtin_shufflevector(ordered, ordered, 0, 2, 1, 3);
#elif REMORA_VECTOR_BYTES == 32
      ordered = __builtin_shufflevector(ordered, ordered, 0, 2, 1, 3, 4, 6, 5, 7);
#endif
      store_as(halves + v * LANES, ordered);
    }
    *scale = {step, 0, static_cast<float>(total) * step, 0};
  }
}
#endif

}  // namespace remora::REMORA_LEVEL
