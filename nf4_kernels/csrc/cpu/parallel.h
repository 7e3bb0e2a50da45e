/* Threads, scratch memory and clocks of the drivers. */
#pragma once

#include <stdint.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <new>

namespace nf4 {

/* A 64-byte aligned buffer that grows and is kept: one per thread and use, so that steady state allocates nothing. */
class Scratch {
 public:
  ~Scratch() { free(data_); }
  void* reserve(size_t bytes) {
    if (bytes <= size_) return data_;
    free(data_);
    size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data_ = aligned_alloc(4096, size_);
    if (!data_) {
      size_ = 0;
      throw std::bad_alloc();
    }
    return data_;
  }
  float* floats(size_t count) { return static_cast<float*>(reserve(count * sizeof(float))); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

extern std::atomic<int64_t> dequant_ns, linear_ns;

/* Adds its lifetime to a total. */
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<int64_t>& total) : total_(total), start_(now_ns()) {}
  ~Stopwatch() { total_.fetch_add(now_ns() - start_, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t>& total_;
  int64_t start_;
};

/* The part of [0, total) that thread `id` of `threads` takes. */
struct Share {
  int64_t begin, end;
  Share(int64_t total, int id, int threads) : begin(total * id / threads), end(total * (id + 1) / threads) {}
};

/* Tasks [0, total) for threads that may not be equally fast, as on a shared host: each takes those of its own part one after
 * another, and then what others have left of theirs. One thread's part follows itself in memory, and its counter mostly stays
 * in its own cache. */
class TaskQueue {
 public:
  /* A queue of the calling thread, which all threads of a region that it starts then take from. */
  static TaskQueue& begin(int64_t total, int threads) {
    static thread_local TaskQueue queue;
    queue.parts_ = threads < kMostParts ? threads : kMostParts;
    for (int i = 0; i < queue.parts_; ++i) {
      Share share(total, i, queue.parts_);
      queue.part_[i].next.store(share.begin, std::memory_order_relaxed);
      queue.part_[i].end = share.end;
    }
    return queue;
  }

  /* The next task for thread `id`; -1 where none is left. */
  int64_t take(int id) {
    for (int i = 0; i < parts_; ++i) {
      Part& part = part_[(id + i) % parts_];
      if (part.next.load(std::memory_order_relaxed) >= part.end) continue;
      const int64_t task = part.next.fetch_add(1, std::memory_order_relaxed);
      if (task < part.end) return task;
    }
    return -1;
  }

 private:
  static constexpr int kMostParts = 64;
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Part part_[kMostParts];
  int parts_ = 0;
};

}  // namespace nf4
