// The threads that run one step together: asleep between steps, at barriers inside one spinning for a while.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "remora.h"

namespace remora {

struct Range {
  int64_t begin, end;
};

// Shared by the members of a team: a sense-reversing barrier. A waiter spins, then yields its core, then sleeps: if the
// missing rank waits for a core behind another process, an idle one is what makes the kernel move it there at once.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait();

 private:
  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
};

// Memory of one rank, 64-byte aligned, kept between calls; its content is undefined at the start of a kernel.
class Scratch {
 public:
  ~Scratch();
  void* reserve(size_t bytes);

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// How many pieces of each rank's part have been taken, for the two calls of Team::divide() that may be under way.
struct alignas(64) Claims {
  int64_t taken[2] = {0, 0};  // accesses are atomic
};

// One thread's view of the step it takes part in. Every rank calls every kernel, and every kernel ends with its own
// share done but NOT with a barrier: whoever reads another rank's share calls barrier() first.
struct Team {
  const int rank, size;

  void barrier() {
    if (size > 1) shared_barrier->wait();
  }

  // This rank's part of [0, count) when it is cut into equal pieces of whole multiples of `unit`.
  Range share(int64_t count, int64_t unit = 1) const {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t begin = units * rank / size * unit, end = units * (rank + 1) / size * unit;
    return {begin < count ? begin : count, end < count ? end : count};
  }

  // Calls body(i) for every i of [0, count) on one rank each: a rank takes those of its share in order, then what others
  // have not begun of theirs, so that one whose core is wanted by somebody else does not keep the rest waiting for all
  // of its share. Every rank calls it with the same count, and a barrier stands between two calls.
  template <class Body>
  void divide(int64_t count, const Body& body) {
    const int turn = num_divided++ & 1;
    // Behind the barrier nobody takes by the last call's numbers any more, and none by the next call's before one.
    __atomic_store_n(&claims[rank].taken[1 - turn], 0, __ATOMIC_RELAXED);
    for (int i = 0; i < size; ++i) {
      const int owner = rank + i < size ? rank + i : rank + i - size;
      const int64_t begin = count * owner / size, end = count * (owner + 1) / size;
      while (true) {
        const int64_t taken = begin + __atomic_fetch_add(&claims[owner].taken[turn], 1, __ATOMIC_RELAXED);
        if (taken >= end) break;
        body(taken);
      }
    }
  }

  // At least `bytes` of this rank's own memory; one region: a second call may move and reuse it.
  void* scratch(size_t bytes) { return own_scratch->reserve(bytes); }

  Barrier* shared_barrier;
  Scratch* own_scratch;
  Claims* claims;  // [size]
  int64_t num_divided = 0;
};

// Owns size - 1 threads; the caller of run() is rank 0. One run() at a time.
class ThreadTeam {
 public:
  using Work = void (*)(void* context, Team& team);

  // cores[i] is the core that rank i + 1 is pinned to; -1 leaves a rank where the kernel puts it.
  ThreadTeam(int size, const int32_t* cores);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }
  void run(Work work, void* context);

 private:
  void serve(int rank);

  const int size_;
  Barrier barrier_;
  std::unique_ptr<Scratch[]> scratch_;
  std::unique_ptr<Claims[]> claims_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t run_number_ = 0;
  bool stopping_ = false;
  Work work_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace remora
