// When a launch began and ended, by the device's own clock: two words of global memory a launch, nanoseconds.
#pragma once

#include <stdint.h>

namespace nf4 {

__device__ __forceinline__ unsigned long long device_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// By one thread of the launch, once what it reads is there. clock may be null, here and below.
__device__ __forceinline__ void clock_start(uint64_t* clock) {
  if (clock) clock[0] = device_time();
}

// By a thread of every block that may be the last to end.
__device__ __forceinline__ void clock_end(uint64_t* clock) {
  if (clock) atomicMax(reinterpret_cast<unsigned long long*>(clock) + 1, device_time());
}

}  // namespace nf4
