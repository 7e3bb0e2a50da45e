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

}  // namespace nf4
