// AMX tiles, or, with REMORA_EMULATE, the same operations in plain C++: the code around them is then run by tests on
// machines without AMX.
//
// A tile has up to 16 rows of 64 bytes. dot_bf16<C, A, B>: C[m][n] += sum over pairs p of A[m][2p] * B[p][2n] +
// A[m][2p + 1] * B[p][2n + 1].
#pragma once
#include "simd.h"

#if REMORA_TILES
namespace remora::REMORA_LEVEL {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
  }
};

#if REMORA_EMULATE

struct EmulatedTiles {
  TileConfig config;
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles;

// Zeroes every tile, as the instruction does.
REMORA_INLINE void tile_configure(const TileConfig& config) {
  emulated_tiles.config = config;
  __builtin_memset(emulated_tiles.data, 0, sizeof emulated_tiles.data);
}
REMORA_INLINE void tile_release() { emulated_tiles.config = TileConfig{}; }
template <int T>
REMORA_INLINE void tile_zero() {
  __builtin_memset(emulated_tiles.data[T], 0, sizeof emulated_tiles.data[T]);
}
template <int T>
REMORA_INLINE void tile_load(const void* base, int64_t stride) {
  tile_zero<T>();
  const TileConfig& config = emulated_tiles.config;
  for (int row = 0; row < config.rows[T]; ++row)
    __builtin_memcpy(emulated_tiles.data[T][row], static_cast<const uint8_t*>(base) + row * stride,
                     config.row_bytes[T]);
}
template <int T>
REMORA_INLINE void tile_store(void* base, int64_t stride) {
  const TileConfig& config = emulated_tiles.config;
  for (int row = 0; row < config.rows[T]; ++row)
    __builtin_memcpy(static_cast<uint8_t*>(base) + row * stride, emulated_tiles.data[T][row], config.row_bytes[T]);
}
template <int C, int A, int B>
REMORA_INLINE void dot_bf16() {
  const TileConfig& config = emulated_tiles.config;
  for (int m = 0; m < config.rows[C]; ++m) {
    float* c = reinterpret_cast<float*>(emulated_tiles.data[C][m]);
    const uint16_t* a = reinterpret_cast<const uint16_t*>(emulated_tiles.data[A][m]);
    for (int pair = 0; pair < config.rows[B]; ++pair) {
      const uint16_t* b = reinterpret_cast<const uint16_t*>(emulated_tiles.data[B][pair]);
      for (int n = 0; n < config.row_bytes[C] / 4; ++n) {
        c[n] += from_bf16(a[2 * pair]) * from_bf16(b[2 * n]);
        c[n] += from_bf16(a[2 * pair + 1]) * from_bf16(b[2 * n + 1]);
      }
    }
  }
}

#else

// In assembly: gcc's intrinsics want literal tile numbers, and gcc 12 drops stores to the configuration that only
// _tile_loadconfig reads. "memory" orders the loads after the stores that fill what they read.
REMORA_INLINE void tile_configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
REMORA_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
REMORA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
REMORA_INLINE void tile_load(const void* base, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int T>
REMORA_INLINE void tile_store(void* base, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
REMORA_INLINE void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
}

#endif

}  // namespace remora::REMORA_LEVEL
#endif  // REMORA_TILES
