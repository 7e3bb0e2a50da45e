// When a launch began and ended, by the device's own clock, and in some launches how long one warp decoded.
#pragma once

#include <stdint.h>

#include "params.h"

namespace nf4 {

enum { kBegan = 0, kEnded = 1, kDecoded = 2, kCycles = 3 };

__device__ __forceinline__ unsigned long long device_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// One thread of the launch calls this once what the launch reads is there. clock may be null, here and below.
__device__ __forceinline__ void clock_start(uint64_t* clock) {
  if (clock) clock[kBegan] = device_time();
}

// A thread of every block that may be the last to end calls this.
__device__ __forceinline__ void clock_end(uint64_t* clock) {
  if (clock) atomicMax(reinterpret_cast<unsigned long long*>(clock) + kEnded, device_time());
}

// Waits until the value has been loaded. The last of several loads is enough, since they complete in order.
__device__ __forceinline__ void settle(unsigned value) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7fffffff; @p nanosleep.u32 1; }" ::"r"(value) : "memory");
}
__device__ __forceinline__ void settle(float value) { settle(__float_as_uint(value)); }
// Keeps the compiler from computing these values later.
template <int kCount>
__device__ __forceinline__ void pin(unsigned (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i]));
}
template <int kCount>
__device__ __forceinline__ void settle(unsigned (&values)[kCount]) {
  pin(values);
  settle(values[kCount - 1]);
}

// The sampled warp's stopwatch, which runs between resume() and pause(). Without kTimed it is empty. A pause waits for the
// value given, so the stages of a sampled loop follow one another, while they overlap in the others. The time at which the
// loop began is kept in the launch's own words, since registers are short.
template <bool kTimed>
struct StageClock {
  unsigned spent, resumed;
  __device__ __forceinline__ static unsigned cycles() {
    unsigned now;
    asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
    return now;
  }
  __device__ __forceinline__ void begin(uint64_t* clock) {
    if constexpr (kTimed) {
      spent = 0;
      if (threadIdx.x > 0) return;
      clock[kDecoded] = device_time();
      clock[kCycles] = cycles();
    }
  }
  __device__ __forceinline__ void resume() {
    if constexpr (kTimed) resumed = cycles();
  }
  template <typename V>
  __device__ __forceinline__ void pause(V&& value) {
    if constexpr (kTimed) {
      settle(value);
      spent += cycles() - resumed;
    }
  }
  // The whole loop is measured in cycles and in nanoseconds, which converts the one to the other.
  __device__ __forceinline__ void end(uint64_t* clock) const {
    if constexpr (kTimed) {
      if (threadIdx.x > 0) return;
      unsigned whole = cycles() - static_cast<unsigned>(clock[kCycles]);
      float share = static_cast<float>(spent) / static_cast<float>(whole);
      clock[kDecoded] = 1 + static_cast<uint64_t>(static_cast<float>(device_time() - clock[kDecoded]) * share);
    }
  }
};

}  // namespace nf4
