// CRC-32 of whole blocks, as zlib computes it, in any number of pieces.
//
// A CRC is linear over GF(2): the state after some bytes is the exclusive or of what each word contributes, and a word
// contributes itself times x^(8 · bytes from its start to the end), modulo the polynomial. So threads read words side
// by side, each keeps a sum of its own words by Horner's rule (the step by a table), and sums meet by atomicXor.
// Polynomials are reflected, as in zlib: the highest bit is x^0.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr uint32 POLYNOMIAL = 0xedb88320u, ONE = 0x80000000u;

__device__ uint32 multiply(uint32 a, uint32 b) {
  uint32 product = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    if ((a >> bit) & 1u) product ^= b;
    b = (b & 1u) ? (b >> 1) ^ POLYNOMIAL : b >> 1;
  }
  return product;
}

// x^(8 · num_bytes)
__device__ uint32 advance(int64 num_bytes) {
  uint32 power = ONE, square = ONE >> 8;
#pragma unroll 1
  for (; num_bytes > 0; num_bytes /= 2) {
    if (num_bytes & 1) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

}  // namespace

// Grid: (pieces, blocks), THREADS threads. sums[blockIdx.y] is exclusive-ored: the caller sets it to 0xffffffff, the
// final inversion. block_bytes is a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS)
    checksum(const uint8* data, const int* blocks, int64 block_bytes, uint32* sums) {
  __shared__ uint32 step[4][256];  // x^(8 · 4 · words between a thread's words) times each value of each byte
  __shared__ uint32 total;
  const int64 num_words = block_bytes / 4, stride = static_cast<int64>(gridDim.x) * THREADS;
  const uint32 factor = advance(4 * stride);
  for (int i = threadIdx.x; i < 1024; i += THREADS)
    step[i / 256][i % 256] = multiply(static_cast<uint32>(i % 256) << (8 * (i / 256)), factor);
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const uint32* words = reinterpret_cast<const uint32*>(data + blocks[blockIdx.y] * block_bytes);
  uint32 state = 0;
  int64 last = -1;
  for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < num_words; i += stride) {
    state = step[0][state & 255u] ^ step[1][(state >> 8) & 255u] ^ step[2][(state >> 16) & 255u] ^ step[3][state >> 24];
    state ^= i == 0 ? ~words[0] : words[i];  // zlib starts from all ones
    last = i;
  }
  if (last >= 0) atomicXor(&total, multiply(state, advance(block_bytes - 4 * last)));
  __syncthreads();
  if (threadIdx.x == 0) atomicXor(&sums[blockIdx.y], total);
}
