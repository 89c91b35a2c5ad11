// Rows of K or V as a block holds them, and what a warp does to write and read one: what kernels/reference/quantise.py
// and row_codec.py define, with the same operations in the same order, so that bytes are equal. Macro: HEAD_DIM, a
// multiple of 16.
//
// A format says how HEAD_DIM values lie in a row: `load` gives STEP consecutive values from d on (a multiple of STEP),
// `two` gives two, both without the scale. Value d has scale d / GROUP of the row; formats without scales have
// NUM_SCALES 0 and one group. ROTATED rows hold the values behind a Hadamard matrix.
#pragma once
#include "common.cuh"

struct Fp32Rows {
  static constexpr int ROW_BYTES = 4 * HEAD_DIM, GROUP = HEAD_DIM, NUM_SCALES = 0, STEP = 4;
  static constexpr bool ROTATED = false;

  static __device__ __forceinline__ void load(const uint8* row, int d, float (&out)[STEP]) {
    const float4 four = *reinterpret_cast<const float4*>(row + 4 * d);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
  }
  static __device__ __forceinline__ float2 two(const uint8* row, int d) {
    return *reinterpret_cast<const float2*>(row + 4 * d);
  }
};

struct Bf16Rows {
  static constexpr int ROW_BYTES = 2 * HEAD_DIM, GROUP = HEAD_DIM, NUM_SCALES = 0, STEP = 8;
  static constexpr bool ROTATED = false;

  static __device__ __forceinline__ void load(const uint8* row, int d, float (&out)[STEP]) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row + 2 * d);
    const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ float2 two(const uint8* row, int d) {
    const uint32 bits = *reinterpret_cast<const uint32*>(row + 2 * d);
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
};

// Byte I of a word, less `bias`: 2^23 plus a byte is a float whose last bits are that byte.
template <int I>
__device__ __forceinline__ float byte_to_float(uint32 word, float bias) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + I)) - (8388608.0f + bias);
}
template <int STEP>
__device__ __forceinline__ void bytes_to_floats(uint32 word, float bias, float (&out)[STEP], int first) {
  out[first] = byte_to_float<0>(word, bias);
  out[first + 1] = byte_to_float<1>(word, bias);
  out[first + 2] = byte_to_float<2>(word, bias);
  out[first + 3] = byte_to_float<3>(word, bias);
}

// Symmetric, one scale a row.
struct Int8Rows {
  static constexpr int ROW_BYTES = HEAD_DIM, GROUP = HEAD_DIM, NUM_SCALES = 1, STEP = 16;
  static constexpr bool ROTATED = false, SIGNED = false;
  static constexpr float LARGEST_CODE = 127.0f;

  static __device__ __forceinline__ void load(const uint8* row, int d, float (&out)[STEP]) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row + d);
    bytes_to_floats(bits.x ^ SIGNS, 128.0f, out, 0);
    bytes_to_floats(bits.y ^ SIGNS, 128.0f, out, 4);
    bytes_to_floats(bits.z ^ SIGNS, 128.0f, out, 8);
    bytes_to_floats(bits.w ^ SIGNS, 128.0f, out, 12);
  }
  static __device__ __forceinline__ float2 two(const uint8* row, int d) {
    const uint32 word = *reinterpret_cast<const uint16*>(row + d) ^ SIGNS;
    return make_float2(byte_to_float<0>(word, 128.0f), byte_to_float<1>(word, 128.0f));
  }
  // Word i of the bytes that stand for a row of codes.
  static __device__ __forceinline__ uint32 pack(const float* codes, int i) {
    uint32 word = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const int code = static_cast<int>(codes[4 * i + byte]);
      word |= (static_cast<uint32>(code) & 255u) << (8 * byte);
    }
    return word;
  }

 private:
  static constexpr uint32 SIGNS = 0x80808080u;
};

// Rotated, then codes of BITS with a scale for every GROUP values (the last group may be shorter). Value i of a group of n
// is the low half of byte i, value i + n / 2 the high half, both plus OFFSET; fifth bits follow, in words of 64.
template <int BITS>
struct RotatedRows {
  static constexpr bool FIVE = BITS == 5;
  static constexpr int OFFSET = FIVE ? 16 : 8, HALVES_BYTES = HEAD_DIM / 2;
  static constexpr int ROW_BYTES = HALVES_BYTES + (FIVE ? (HEAD_DIM + 63) / 64 * 8 : 0);
  static constexpr int GROUP = 64, NUM_SCALES = (HEAD_DIM + GROUP - 1) / GROUP, STEP = 16;
  static constexpr bool ROTATED = true, SIGNED = true;
  static constexpr float LARGEST_CODE = OFFSET;

  static __device__ __forceinline__ void load(const uint8* row, int d, float (&out)[STEP]) {
    const int group = d / GROUP * GROUP, half = min(GROUP, HEAD_DIM - group) / 2, i = d - group;
    uint32 bits[4];
    if (ROW_BYTES % 16 == 0 && half % STEP == 0) {
      const uint4 four = *reinterpret_cast<const uint4*>(row + group / 2 + i % half);
      bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
    } else {  // a step may end in the low halves and go on in the high ones
#pragma unroll
      for (int part = 0; part < 4; ++part)
        bits[part] = *reinterpret_cast<const uint32*>(row + group / 2 + (i + 4 * part) % half);
    }
#pragma unroll
    for (int part = 0; part < 4; ++part)
      bits[part] = (i + 4 * part < half ? bits[part] : bits[part] >> 4) & HALVES;
    const uint32 fifth = FIVE ? *reinterpret_cast<const uint16*>(row + HALVES_BYTES + d / 8) : 0;
#pragma unroll
    for (int part = 0; part < 4; ++part)
      bytes_to_floats(bits[part] | spread(fifth >> (4 * part)), OFFSET, out, 4 * part);
  }
  static __device__ __forceinline__ float2 two(const uint8* row, int d) {
    const int group = d / GROUP * GROUP, half = min(GROUP, HEAD_DIM - group) / 2, i = d - group;
    const uint32 bits = *reinterpret_cast<const uint16*>(row + group / 2 + (i < half ? i : i - half));
    uint32 word = (i < half ? bits : bits >> 4) & HALVES;
    if (FIVE) word |= spread(row[HALVES_BYTES + d / 8] >> (d % 8));
    return make_float2(byte_to_float<0>(word, OFFSET), byte_to_float<1>(word, OFFSET));
  }
  static __device__ __forceinline__ uint32 pack(const float* codes, int i) {
    uint32 word = 0;
    if (FIVE && 4 * i >= HALVES_BYTES) {
      const int first = 8 * (4 * i - HALVES_BYTES);
      for (int d = first; d < min(first + 32, HEAD_DIM); ++d) word |= (shifted(codes[d]) >> 4) << (d - first);
      return word;
    }
    for (int byte = 0; byte < 4; ++byte) {
      const int position = 4 * i + byte, group = position / (GROUP / 2) * GROUP;
      const float* low = codes + group + position % (GROUP / 2);
      const int high = min(GROUP, HEAD_DIM - group) / 2;
      word |= ((shifted(low[0]) & 15u) | (shifted(low[high]) & 15u) << 4) << (8 * byte);
    }
    return word;
  }

 private:
  static constexpr uint32 HALVES = 0x0f0f0f0fu;

  static __device__ __forceinline__ uint32 shifted(float code) { return static_cast<uint32>(code + OFFSET); }
  // Four bits to bit 4 of one byte each.
  static __device__ __forceinline__ uint32 spread(uint32 bits) {
    return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4;
  }
};
using Int4Rows = RotatedRows<4>;
using Int5Rows = RotatedRows<5>;

// The rows of one head of a block, and behind them their scales.
template <class Format>
struct HeadRows {
  uint8* start;
  int block_tokens;

  __device__ __forceinline__ uint8* row(int slot) const { return start + slot * Format::ROW_BYTES; }
  __device__ __forceinline__ Bf16* scales(int slot) const {
    return reinterpret_cast<Bf16*>(start + block_tokens * Format::ROW_BYTES) + slot * Format::NUM_SCALES;
  }
};

// Who works on rows together: the lanes of a warp, or all threads of a block.
struct WarpTeam {
  static __device__ __forceinline__ int rank() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int size() { return 32; }
  static __device__ __forceinline__ void wait() { __syncwarp(); }
};
struct BlockTeam {
  static __device__ __forceinline__ int rank() { return threadIdx.x; }
  static __device__ __forceinline__ int size() { return blockDim.x; }
  static __device__ __forceinline__ void wait() { __syncthreads(); }
};

// Rotates rows in shared memory by a Hadamard matrix, in pieces of the largest power of two that divides HEAD_DIM. Its
// own inverse. The team waits before and behind.
template <class Team>
__device__ __forceinline__ void rotate_rows(float* rows, int num_rows) {
  constexpr int SIZE = HEAD_DIM & -HEAD_DIM;
  constexpr float NORM = SIZE == 16 ? 0.25f : SIZE == 32 ? 0.176776695296636893f : SIZE == 64 ? 0.125f
                       : SIZE == 128 ? 0.0883883476483184406f : 0.0625f;
  static_assert(SIZE >= 16 && SIZE <= 256, "head sizes are multiples of 16 up to 256");
  for (int half = 1; half < SIZE; half *= 2) {
    Team::wait();
    for (int i = Team::rank(); i < num_rows * (HEAD_DIM / 2); i += Team::size()) {
      float* pair = rows + i / half * (2 * half) + i % half;
      const float low = pair[0], high = pair[half];
      pair[0] = low + high;
      pair[half] = low - high;
    }
  }
  Team::wait();
  for (int i = Team::rank(); i < num_rows * HEAD_DIM; i += Team::size()) rows[i] *= NORM;
  Team::wait();
}

// The smallest bf16 that is not below x; x is not negative.
__device__ __forceinline__ Bf16 bf16_above(float x) {
  return {static_cast<uint16>((__float_as_uint(x) + 0xffffu) >> 16)};
}

__device__ __forceinline__ bool is_finite(Bf16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }
__device__ __forceinline__ bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// Quantises one group in shared memory in place, by a warp: values become codes -largest_code..largest_code; if SIGNED,
// the one farthest from zero becomes -largest_code, by a scale that may be negative, and none is above largest_code - 1.
// Returns the scale, NaN when a value is not finite.
template <bool SIGNED>
__device__ __forceinline__ Bf16 quantise_group(float* values, int count, float largest_code) {
  constexpr float SMALLEST = 7.88860905221011805e-31f;  // 2^-100: the reciprocal of a smaller scale would overflow
  constexpr uint32 INFINITE = 0x7f800000u;
  const int lane = threadIdx.x % 32;
  uint32 largest = 0;  // magnitudes as bits: infinities and NaN are above every number
  for (int i = lane; i < count; i += 32) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
  largest = warp_max(largest);
  const float top = __uint_as_float(largest);
  const bool is_zero = largest >= INFINITE || top < SMALLEST;
  Bf16 scale = is_zero ? Bf16{0} : bf16_above(top / largest_code);
  if (SIGNED && !is_zero) {
    uint32 is_positive = 0;
    for (int i = lane; i < count; i += 32) is_positive |= values[i] == top;
    if (warp_max(is_positive)) scale.bits |= 0x8000u;
  }
  const float inverse = is_zero ? 0.0f : 1.0f / to_float(scale);
  for (int i = lane; i < count; i += 32) {
    const float code = is_zero ? 0.0f : rintf(values[i] * inverse);
    values[i] = SIGNED ? fminf(code, largest_code - 1.0f) : code;
  }
  return largest >= INFINITE ? Bf16{0x7fc0} : scale;
}

// Writes a row of fp32 from shared memory into a block, by a warp; the row is used up. False in a lane means that the
// format cannot hold a value (NaN, an infinity, what becomes one): then its group, or the value alone, is not finite.
template <class Format>
__device__ __forceinline__ bool encode_row(float* values, HeadRows<Format> head, int slot) {
  const int lane = threadIdx.x % 32;
  uint8* row = head.row(slot);
  bool fits = true;
  __syncwarp();
  if constexpr (Format::NUM_SCALES == 0) {
    using Value = typename Pick<Format::ROW_BYTES == 4 * HEAD_DIM, float, Bf16>::Type;
    for (int d = lane; d < HEAD_DIM; d += 32) {
      const Value value = from_float<Value>(values[d]);
      reinterpret_cast<Value*>(row)[d] = value;
      fits = fits && is_finite(value);
    }
  } else {
    if (Format::ROTATED) rotate_rows<WarpTeam>(values, 1);
    Bf16* scales = head.scales(slot);
    for (int group = 0; group < Format::NUM_SCALES; ++group) {
      const int first = group * Format::GROUP, count = min(Format::GROUP, HEAD_DIM - first);
      const Bf16 scale = quantise_group<Format::SIGNED>(values + first, count, Format::LARGEST_CODE);
      fits = fits && is_finite(scale);
      if (lane == 0) scales[group] = scale;
    }
    __syncwarp();
    for (int i = lane; i < Format::ROW_BYTES / 4; i += 32) reinterpret_cast<uint32*>(row)[i] = Format::pack(values, i);
  }
  __syncwarp();
  return fits;
}

// Reads a row of a block into fp32 in shared memory, by a warp.
template <class Format>
__device__ __forceinline__ void decode_row(HeadRows<Format> head, int slot, float* values) {
  __syncwarp();
  for (int d = threadIdx.x % 32 * Format::STEP; d < HEAD_DIM; d += 32 * Format::STEP) {
    float step[Format::STEP];
    Format::load(head.row(slot), d, step);
    float scale = 1.0f;
    if constexpr (Format::NUM_SCALES > 0) scale = to_float(head.scales(slot)[d / Format::GROUP]);
#pragma unroll
    for (int i = 0; i < Format::STEP; ++i) values[d + i] = Format::NUM_SCALES > 0 ? step[i] * scale : step[i];
  }
  if (Format::ROTATED) rotate_rows<WarpTeam>(values, 1);
  __syncwarp();
}
