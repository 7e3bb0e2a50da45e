// sm_90a's instructions as functions, beside wgmma itself (shapes.cuh): descriptors, fences, tensor copies, registers.
#pragma once

#include "../pipeline.cuh"
#include "shapes.cuh"

namespace nf4 {

// wgmma's descriptor of a tile of 128-byte rows that starts on a 1 KB boundary and whose 16-byte chunks are XORed with the
// row (mod 8). swizzled_tile() gives its lower half, to which a distance in 16 bytes can be added; descriptor() completes
// it.
__device__ __forceinline__ unsigned swizzled_tile(unsigned address) { return 1u << 16 | (address & 0x3FFFF) >> 4; }
__device__ __forceinline__ uint64_t descriptor(unsigned tile) {
  constexpr uint64_t kEightRows = 1024 >> 4;
  return uint64_t{1} << 62 | kEightRows << 32 | tile;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns once at most kPending committed groups of wgmma are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// One thread of the warp arrives. It is elected, since a comparison of the lane's number would read that anew each time
// where registers are short.
__device__ __forceinline__ void warp_arrive(unsigned barrier) {
  asm volatile(
      "{ .reg .pred p;\n"
      ".reg .b64 t;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "@p mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier)
      : "memory");
}

// Makes the barriers that have just been set up visible to asynchronous copies.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Counts this thread's arrival, and the bytes for which the barrier's phase then waits.
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Copies the box of a tensor map at these coordinates; the barrier counts its bytes once they have landed.
__device__ __forceinline__ void copy_box(unsigned target, const void* map, int x, int y, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_box(unsigned target, const void* map, int x, int y, int z, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Loads the map itself into the cache of descriptors, so that the first copy need not wait for it.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies bytes (a multiple of 16) of global memory; the barrier counts them once they have landed.
__device__ __forceinline__ void copy_bytes(unsigned target, const void* source, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Orders this thread's reads of shared memory before any asynchronous copy that is started once it has arrived at a
// barrier. The arrival alone does not order the two: copies of the next weights overtook reads that were still queued.
__device__ __forceinline__ void fence_loads_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// setmaxnreg: a warpgroup waits for more registers, or gives back what it does not need.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nf4
