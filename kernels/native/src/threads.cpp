#include "threads.h"

#include <cstdlib>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace remora {
namespace {

// The first is some microseconds, in which ranks arrive that all have a core and equal work; a rank that shares its core
// with one it waits for should not spin for longer. The second is about 0.2 ms where nobody else wants the core.
constexpr int SPINS_BEFORE_YIELD = 500;
constexpr int YIELDS_BEFORE_SLEEP = 400;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin_current_thread(int core) {
#if defined(__linux__)
  if (core < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a core taken away from us is no reason to fail
#else
  (void)core;
#endif
}

void name_current_thread(const char* name) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#else
  (void)name;
#endif
}

// Returns when the word is no longer `seen`, or earlier.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

void Barrier::wait() {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    // In one order with what sleepers do: either they see the new generation, or they are seen here.
    generation_.store(generation + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(generation_);
    return;
  }
  for (int turns = 0; generation_.load(std::memory_order_acquire) == generation; ++turns) {
    if (turns < SPINS_BEFORE_YIELD) {
      relax();
    } else if (turns < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP) {
      std::this_thread::yield();
    } else {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      sleep_while(generation_, generation);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

Scratch::~Scratch() { std::free(data_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes > bytes_) {
    std::free(data_);
    bytes_ = (bytes + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(64, bytes_);
    if (data_ == nullptr) {
      bytes_ = 0;
      std::abort();  // inside a step: no way to unwind the other ranks
    }
  }
  return data_;
}

ThreadTeam::ThreadTeam(int size, const int32_t* cores)
    : size_(size),
      barrier_(size),
      scratch_(new Scratch[static_cast<size_t>(size)]),
      claims_(new Claims[static_cast<size_t>(size)]) {
  for (int rank = 1; rank < size; ++rank) {
    const int core = cores == nullptr ? -1 : cores[rank - 1];
    threads_.emplace_back([this, rank, core] {
      name_current_thread("remora-team");
      pin_current_thread(core);
      serve(rank);
    });
  }
}

ThreadTeam::~ThreadTeam() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadTeam::serve(int rank) {
  for (uint64_t seen = 0;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || run_number_ != seen; });
      if (stopping_) return;
      seen = run_number_;
    }
    Team team{rank, size_, &barrier_, &scratch_[rank], claims_.get()};
    work_(context_, team);
    team.barrier();
  }
}

void ThreadTeam::run(Work work, void* context) {
  for (int rank = 0; rank < size_; ++rank) claims_[rank] = {};
  if (size_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work;
      context_ = context;
      ++run_number_;
    }
    wake_.notify_all();
  }
  Team team{0, size_, &barrier_, &scratch_[0], claims_.get()};
  work(context, team);
  team.barrier();  // all ranks are done with `context` and with their share
}

}  // namespace remora
