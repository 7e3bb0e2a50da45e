// Shared-memory barriers and asynchronous copies: bulk copies from sm_90 on, cp.async before.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace nf4 {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

// Waits for `threads` threads of the block at one of its 16 hardware barriers (0 is __syncthreads).
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this thread at a hardware barrier without waiting.
__device__ __forceinline__ void barrier_signal(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether the phase of this parity is complete. A warp that asks early has the answer when it needs it.
__device__ __forceinline__ bool barrier_passed(unsigned barrier, unsigned parity) {
  unsigned passed;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}

// Returns once the phase of this parity is complete. Parity alone tells phases apart, so a waiter must wait for each of
// them.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred p;\n"
      "WAIT_%=: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies bytes (a multiple of 16) of global memory; the barrier counts this lane's arrival once they have landed.
__device__ __forceinline__ void copy_and_arrive(unsigned target, const void* source, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier), "r"(bytes)
               : "memory");
  if (bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
  }
#else
  const char* from = static_cast<const char*>(source);
  for (unsigned done = 0; done < bytes; done += 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + done), "l"(from + done) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Programmatic dependent launch: lets the next launch's blocks start where there is room. They wait for what this one
// writes.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel in front has ended: then what it wrote can be read, and what it reads can be written.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace nf4
