// What linear_rows needs from sm_90 on beside pipeline.cuh: bulk copies by one lane, sleep, clusters. Before sm_90 these do
// nothing.
#pragma once

#include "../pipeline.cuh"

namespace nf4 {

// True in one lane of the warp, which the compiler knows to be one (CUTLASS's elect_one_sync).
__device__ __forceinline__ bool elect_one() {
#if __CUDA_ARCH__ >= 900
  unsigned one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(one));
  return one;
#else
  return threadIdx.x % 32 == 0;
#endif
}

// An L2 policy for bytes that are read once: L2 evicts them before what is read again.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Copies bytes (a multiple of 16) of global memory; the barrier counts them once they have landed.
__device__ __forceinline__ void bulk_copy(unsigned target, const void* source, unsigned bytes, unsigned barrier,
                                          uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void sleep_ns(unsigned nanoseconds) {
#if __CUDA_ARCH__ >= 900
  if (nanoseconds) __nanosleep(nanoseconds);
#endif
}

// The barrier of all threads of a cluster: all of them arrive, and those that reach into another block wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same place of shared memory in another block of the cluster.
__device__ __forceinline__ unsigned remote_address(unsigned address, int rank) {
  unsigned remote = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

// The remote barrier counts the bytes once they have landed.
__device__ __forceinline__ void store_remote(unsigned address, float4 value, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
#endif
}

// Arrives at a barrier of another block, by its remote address.
__device__ __forceinline__ void barrier_arrive_remote(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Counts this thread's arrival, and bytes that are still to come.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

}  // namespace nf4
