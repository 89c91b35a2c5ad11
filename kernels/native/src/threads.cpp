#include "threads.h"

#include <cstdlib>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace remora {
namespace {

constexpr int SPINS_BEFORE_YIELD = 4000;

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

}  // namespace

void Barrier::wait() {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins < SPINS_BEFORE_YIELD) {
      relax();
    } else {
#if defined(__linux__)
      sched_yield();
#else
      std::this_thread::yield();
#endif
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
    : size_(size), barrier_(size), scratch_(new Scratch[static_cast<size_t>(size)]) {
  for (int rank = 1; rank < size; ++rank) {
    const int core = cores == nullptr ? -1 : cores[rank - 1];
    threads_.emplace_back([this, rank, core] {
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
  Team team{rank, size_, &barrier_, &scratch_[rank]};
  for (uint64_t seen = 0;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || run_number_ != seen; });
      if (stopping_) return;
      seen = run_number_;
    }
    work_(context_, team);
    team.barrier();
  }
}

void ThreadTeam::run(Work work, void* context) {
  if (size_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work;
      context_ = context;
      ++run_number_;
    }
    wake_.notify_all();
  }
  Team team{0, size_, &barrier_, &scratch_[0]};
  work(context, team);
  team.barrier();  // all ranks are done with `context` and with their share
}

}  // namespace remora
