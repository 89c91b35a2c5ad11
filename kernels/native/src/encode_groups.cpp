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

  // Codes of `step`, and their sum.
  REMORA_INLINE_MEMBER int32_t codes(float step, vint* out) const {
    const vfloat inverse = splat(step > 0x1p-120f ? 1.0f / step : 0.0f);
    vint total = {};
    for (int v = 0; v < GROUP_VECTORS; ++v) total += out[v] = round_to_int(values[v] * inverse);
    return sum(total);
  }
};

}  // namespace

#if REMORA_VNNI && !REMORA_TILES
namespace {

// A group stands out whose largest value is more than this many times the root mean square of its row. Of the groups of
// SmolLM2 that is every eighth; docs/precision.md has what other ratios cost.
constexpr float OUTLIER_RATIO = 5.0f;
// Codes of a group that stands out are -32639..32639: steps of 256 that int8 holds, and a remainder of -128..127.
constexpr float MOST_CODE = 127.0f, MOST_LONG_CODE = 127.0f * 256.0f + 127.0f;

typedef int8_t vbytes __attribute__((vector_size(LANES), may_alias));
REMORA_INLINE void store_bytes(int8_t* out, const vint* codes) {
  for (int v = 0; v < GROUP_VECTORS; ++v) store_as(out + v * LANES, __builtin_convertvector(codes[v], vbytes));
}

}  // namespace

void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales) {
  const int64_t groups = num_groups(num_in);
  auto* scale = reinterpret_cast<GroupScale*>(scales);
  const Remainders more = remainders_of(scales, groups);
  vfloat squares = {};
  for (int64_t index = 0; index < groups; ++index) {
    const Group group(x, num_in, index);
    scale[index].scale = group.largest();
    for (const vfloat v : group.values) squares = fma(v, v, squares);
  }
  const float outlier = OUTLIER_RATIO * __builtin_sqrtf(sum(squares) / static_cast<float>(num_in));
  int32_t count = 0;
  for (int64_t index = 0; index < groups; ++index) {
    const Group group(x, num_in, index);
    const float largest = scale[index].scale;
    auto* bytes = reinterpret_cast<int8_t*>(out) + index * INPUT_GROUP;
    vint codes[GROUP_VECTORS];
    if (!(largest > outlier)) {
      const float step = largest / MOST_CODE;
      const int32_t total = group.codes(step, codes);
      store_bytes(bytes, codes);
      scale[index] = {step, static_cast<float>(total) * step, -128 * total};
      continue;
    }
    const float step = largest / MOST_LONG_CODE;
    const int32_t total = group.codes(step, codes);
    vint high[GROUP_VECTORS], total_high = {};
    for (int v = 0; v < GROUP_VECTORS; ++v) {
      total_high += high[v] = (codes[v] + 128) >> 8;
      codes[v] -= high[v] * 256;
    }
    const int32_t sum_high = sum(total_high);
    Remainder& term = more.terms[count++];
    term.group = static_cast<int32_t>(index);
    term.scale = step;
    term.offset = -128 * (total - 256 * sum_high);
    store_bytes(bytes, high);
    store_bytes(term.codes, codes);
    scale[index] = {step * 256.0f, static_cast<float>(total) * step, -128 * sum_high};
  }
  *more.count = count;
}

#else

void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales) {
  typedef int16_t vhalf_ints __attribute__((vector_size(REMORA_VECTOR_BYTES / 2), may_alias));
  auto* scale = reinterpret_cast<GroupScale*>(scales);
  for (int64_t index = 0; index < num_groups(num_in); ++index, ++scale) {
    const Group group(x, num_in, index);
    const float step = group.largest() / 32767.0f;
    vint codes[GROUP_VECTORS];
    const int32_t total = group.codes(step, codes);
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
    *scale = {step, static_cast<float>(total) * step, 0};
  }
}
#endif

}  // namespace remora::REMORA_LEVEL
