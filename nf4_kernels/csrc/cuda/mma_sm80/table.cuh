// What linear_mma.cuh and whole/ share: the table of pairs of codes, copies of activations, and their operands.
#pragma once

#include "../common.cuh"
#include "../rows/layout.cuh"

namespace nf4 {

// Fills all copies of the table's entries with the block's first threads, whole warps.
template <typename T>
__device__ __forceinline__ void fill_table(char* shared, int threads) {
  constexpr float codes[16] = {NF4_CODEBOOK};
  float code = codes[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    float other = codes[i];
    asm volatile("" : "+f"(other));  // else the codes become an array in memory
    code = threadIdx.x % 16 == i ? other : code;
  }
  for (int entry = threadIdx.x; entry < 256; entry += threads) {
    float high = __shfl_sync(~0u, code, entry / 16);
    unsigned pair = pack2<T>(high * kStretch, code * kStretch);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Neighbouring threads write different banks.
      *reinterpret_cast<uint4*>(shared + entry * kTableStride + (i + entry) % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
  }
}

// The address of a token's 16-byte piece: pieces of odd tokens are swapped in pairs, so that the reads of a quarter warp (every
// other piece of two tokens) lie in different banks.
__device__ __forceinline__ int piece_offset(int token, int piece) { return (piece ^ (token & 1)) * 16; }

// Copies 16 bytes, or writes as many zeros.
__device__ __forceinline__ void copy_or_zero(unsigned target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// Copies the code of nested scales, if they are nested, with the block's first threads.
__device__ __forceinline__ void copy_scale_code(const Nf4Weight& weight, unsigned target, int threads) {
#if __CUDA_ARCH__ >= 800
  if (!weight.absmax_8bit) return;
  for (int i = threadIdx.x; i < 256; i += threads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target + i * 4), "l"(weight.absmax_code + i) : "memory");
  }
#endif
}

__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// The barrier counts this thread's arrival once its copies so far have landed.
__device__ __forceinline__ void copies_arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// The B operands of 32 k and 8 tokens.
__device__ __forceinline__ uint4 load_operand(unsigned from) {
  uint4 to;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "r"(from));
  return to;
}

// Keeps the compiler from computing a value again where it is used.
__device__ __forceinline__ void keep(unsigned& value) { asm volatile("" : "+r"(value)); }

}  // namespace nf4
