// The KV blocks of a sequence in shared memory: asynchronous copies into a warp's own ring, and the operands of matrix
// instructions from there.
#pragma once

#include <stdint.h>

#include "../common.cuh"
#include "../pipeline.cuh"

namespace nf4 {
namespace attention {

constexpr int kDim = 128;   // elements of a head
constexpr int kBlock = 16;  // tokens of a KV block: the rows of a matrix instruction
constexpr unsigned kRowBytes = kDim * 2;             // of a token's key or value of one head
constexpr unsigned kHalfBytes = kBlock * kRowBytes;  // the keys of a KV block, behind which its values lie
constexpr unsigned kStageBytes = 2 * kHalfBytes;

// Where 16 bytes of a row lie: in an order that differs from row to row, so that the same 16 bytes of eight rows are in
// different banks.
__device__ __forceinline__ unsigned place_of(unsigned row, unsigned chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Copies 16 bytes, or writes zeros where they are not wanted.
__device__ __forceinline__ void copy_chunk(unsigned target, const void* source, bool wanted) {
  int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending groups of this thread's copies have landed.
template <int kPending>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A warp copies rows [first, last) of a KV block's keys and values of one head; its other rows become zeros, which no
// probability of 0 turns into NaN. keys: the block's first row of the head; pitch: elements from row to row; half: elements
// from the block's keys to its values.
template <typename T>
__device__ __forceinline__ void copy_block(unsigned stage, const T* keys, int64_t pitch, int64_t half, int first, int last) {
  unsigned lane = threadIdx.x % 32, chunk = lane % 16;
  int row = lane / 16;
  const T* from = keys + row * pitch + chunk * 8;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i, row += 2, from += 2 * pitch) {
    bool wanted = row >= first && row < last;
    unsigned target = stage + place_of(row, chunk);
    copy_chunk(target, from, wanted);
    copy_chunk(target + kHalfBytes, from + half, wanted);
  }
}

__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Transposes a matrix of 8 x 8 elements that a warp holds, a pair of a row's elements in each lane.
__device__ __forceinline__ unsigned transposed(unsigned pairs) {
  unsigned result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pairs));
  return result;
}

}  // namespace attention
}  // namespace nf4
