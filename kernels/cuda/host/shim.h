// Runs CUDA sources on the host, for tests: blocks one after another, the threads of a block as coroutines that switch
// at barriers and warp exchanges. Not for speed. Included before the source; emulate_NAME() is generated per kernel.
//
// Detected: threads of a block that wait at different barriers or at none, lanes missing from a full-mask exchange,
// writes beyond the dynamic shared memory. Dynamic shared memory starts as NaN. Between barriers threads take turns in
// an order that changes every time, so that a missing barrier gives wrong results.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "coroutine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one at a time
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DYNAMIC_SHARED(name) uint8* const name = remora_shim::dynamic_shared()
#define __syncthreads() remora_shim::wait(remora_shim::State::at_barrier, __LINE__)
#define __syncwarp() remora_shim::wait(remora_shim::State::at_exchange, __LINE__)

struct Dim3 {
  unsigned x, y, z;
};
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
// Byte i of the result is the one of x (0 to 3) or y (4 to 7) that nibble i of the selector names.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7u)) & 255u) << (8 * i);
  return result;
}
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }

namespace remora_shim {

enum class State { ready, at_barrier, at_exchange, done };

constexpr size_t STACK_BYTES = 64 * 1024, CANARY_BYTES = 4096;
constexpr unsigned char CANARY = 0xa5;

struct Thread {
  Coroutine coroutine;
  State state = State::ready;
  int line = 0;
  uint64_t exchanged = 0;
};

// One launch at a time: everything is in here.
static std::vector<Thread> threads;
static std::vector<unsigned char> shared_memory, stacks;
static size_t current = 0;
static uint64_t order = 0;  // a pseudo-random sequence, the same in every process
static char problem[256];

static unsigned char* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(shared_memory.data()) + CANARY_BYTES;
  return reinterpret_cast<unsigned char*>((address + 127) / 128 * 128);
}

static void wait(State state, int line) {
  Thread& thread = threads[current];
  thread.state = state;
  thread.line = line;
  thread.coroutine.leave();
}

// What lane `lane` of the warp gave to the same exchange.
template <class T>
static T exchange(T value, unsigned lane, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "exchanged values have at most 8 bytes");
  const size_t warp = current / 32 * 32;
  memcpy(&threads[current].exchanged, &value, sizeof value);
  wait(State::at_exchange, line);
  T result;
  memcpy(&result, &threads[warp + lane % 32].exchanged, sizeof result);
  wait(State::at_exchange, line);  // until all have read
  return result;
}

static bool fail(const char* what, size_t thread) {
  snprintf(problem, sizeof problem, "%s: block (%u, %u, %u), thread %zu, line %d", what, blockIdx.x, blockIdx.y,
           blockIdx.z, thread, threads[thread].line);
  return false;
}

// Lets all of first..end-1 go on when every one of them waits at the same line, in that state; `released` says if so.
static bool release(size_t first, size_t end, State state, bool& released) {
  const Thread* leader = nullptr;
  for (size_t i = first; i < end; ++i) {
    if (threads[i].state == State::done) continue;
    if (threads[i].state != state) return true;
    if (leader != nullptr && leader->line != threads[i].line) return fail("threads wait at different lines", i);
    leader = &threads[i];
  }
  if (leader == nullptr) return true;
  for (size_t i = first; i < end; ++i) {
    if (threads[i].state == State::done) return fail("a thread has ended while others wait", i);
    threads[i].state = State::ready;
  }
  released = true;
  return true;
}

static bool run_block(void (*body)(void*), void* call, size_t shared_bytes) {
  std::memset(shared_memory.data(), CANARY, shared_memory.size());
  std::memset(dynamic_shared(), 0xff, shared_bytes);
  const size_t count = threads.size();
  for (size_t i = 0; i < count; ++i) {
    threads[i].coroutine.start(body, call, stacks.data() + i * STACK_BYTES, STACK_BYTES);
    threads[i].state = State::ready;
  }
  for (size_t running = count; running > 0;) {
    bool moved = false;
    order = order * 6364136223846793005u + 1442695040888963407u;
    const size_t offset = (order >> 33) % count;
    for (size_t turn = 0; turn < count; ++turn) {
      current = (order >> 63 ? count - 1 - turn + offset : turn + offset) % count;
      Thread& thread = threads[current];
      if (thread.state != State::ready) continue;
      moved = true;
      const unsigned index = static_cast<unsigned>(current);
      threadIdx = {index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y};
      if (thread.coroutine.enter()) {
        thread.state = State::done;
        --running;
      }
    }
    for (size_t warp = 0; warp < count; warp += 32)
      if (!release(warp, warp + 32 < count ? warp + 32 : count, State::at_exchange, moved)) return false;
    if (!release(0, count, State::at_barrier, moved)) return false;
    for (size_t i = 0; !moved && i < count; ++i)
      if (threads[i].state == State::at_barrier || threads[i].state == State::at_exchange)
        return fail("threads wait for others that never come", i);
  }
  const unsigned char* shared = dynamic_shared();
  for (const unsigned char* p = shared_memory.data(); p < shared; ++p)
    if (*p != CANARY) return fail("a write before the dynamic shared memory", 0);
  for (const unsigned char* p = shared + shared_bytes; p < shared_memory.data() + shared_memory.size(); ++p)
    if (*p != CANARY) return fail("a write beyond the dynamic shared memory", 0);
  return true;
}

// Runs a kernel with arguments that are each in a slot of 8 bytes. Returns null, or what went wrong.
template <class... Arguments>
struct Call {
  void (*kernel)(Arguments...);
  const uint64_t* slots;

  template <class T>
  static T take(const uint64_t* slot) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "arguments are numbers and pointers");
    T value;
    memcpy(&value, slot, sizeof value);
    return value;
  }
  template <size_t... I>
  void invoke(std::integer_sequence<size_t, I...>) {
    kernel(take<Arguments>(slots + I)...);
  }
  static void run(void* call) { static_cast<Call*>(call)->invoke(std::index_sequence_for<Arguments...>()); }
};

template <class... Arguments>
static const char* launch(void (*kernel)(Arguments...), const unsigned* grid, const unsigned* block,
                          size_t shared_bytes, const uint64_t* slots, int num_slots) {
  if (num_slots != static_cast<int>(sizeof...(Arguments))) return "the kernel takes another number of arguments";
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  const size_t num_threads = static_cast<size_t>(block[0]) * block[1] * block[2];
  threads.resize(num_threads);
  if (stacks.size() < num_threads * STACK_BYTES) stacks.resize(num_threads * STACK_BYTES);
  shared_memory.resize(shared_bytes + 2 * CANARY_BYTES + 128);
  Call<Arguments...> call{kernel, slots};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        if (!run_block(&Call<Arguments...>::run, &call, shared_bytes)) return problem;
      }
  return nullptr;
}

}  // namespace remora_shim

static inline void sincosf_into(float angle, float* sine, float* cosine) {
  *sine = std::sin(angle);
  *cosine = std::cos(angle);
}
#define sincosf sincosf_into
#define __shfl_xor_sync(mask, value, distance) \
  remora_shim::exchange(value, (static_cast<unsigned>(remora_shim::current) % 32) ^ (distance), __LINE__)
template <class T>
static inline T atomicXor(T* address, T value) {
  const T old = *address;
  *address ^= value;
  return old;
}
