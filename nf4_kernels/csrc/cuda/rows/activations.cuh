// The B operands of linear_rows.cuh: a part's activations in registers, normalised where a launch does that.
#pragma once

#include "../mma.cuh"
#include "layout.cuh"

namespace nf4 {

// Loads the activations of one part that a consumer warp needs, as B registers. These are no __ldg: the kernel in front may
// write them after this one has started, and the compiler takes such reads for constant and moves them before the wait. Nor
// are they __ldcg: the two reads are halves of the same 32 bytes, which L1 so loads once.
template <typename T, int kWarps, int kBlocks>
__device__ __forceinline__ void load_activations(const RowsArgs& args, int part, uint4 (&b)[kBlocks][2]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = part * args.part_blocks, end = min(begin + args.part_blocks, args.k_blocks);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    int block = begin + i * kWarps + warp;
    const uint4* from =
        reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) + int64_t{g} * args.k + block * 64 + t * 16);
    bool valid = block < end && g < args.m;
    b[i][0] = valid ? *from : make_uint4(0, 0, 0, 0);
    b[i][1] = valid ? from[1] : make_uint4(0, 0, 0, 0);
  }
}

// Loads the sectors of the norm's weight that this warp will read into L1, before the activations are there.
template <typename T, int kWarps, int kBlocks>
__device__ __forceinline__ void prefetch_norm_weight(const RowsArgs& args, int part) {
  int begin = part * args.part_blocks, end = min(begin + args.part_blocks, args.k_blocks);
  for (int i = threadIdx.x % 32; i < kBlocks * 4; i += 32) {
    int block = begin + i / 4 * kWarps + threadIdx.x / 32;
    if (block >= end) continue;
    const T* from = static_cast<const T*>(args.norm_weight) + block * 64 + i % 4 * 16;
    unsigned any;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(any) : "l"(from));
  }
}

// Adds the squares of activations, which are the diagonal of the tile times itself: thread (g, t) holds token g's in
// element g % 2 where t is g / 2. There are four independent chains, since 40 dependent mma take as long as their operands'
// loads.
template <typename T, int kBlocks>
__device__ __forceinline__ void add_squares(float (&squares)[4][4], const uint4 (&b)[kBlocks][2]) {
  __syncwarp();  // so that all loads are issued before the first is used
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& four = b[i][half];
      unsigned first[4] = {four.x, 0, four.y, 0}, second[4] = {four.z, 0, four.w, 0};
      float(&one)[4] = squares[half * 2];
      float(&other)[4] = squares[half * 2 + 1];
      mma<T>(one, first, four.x, four.y, one);
      mma<T>(other, second, four.z, four.w, other);
    }
  }
}

// Multiplies the activations by the norm's weight; the reducing warp divides the sums by the root of the squares' mean.
template <typename T, int kWarps, int kBlocks>
__device__ __forceinline__ void multiply_by_norm_weight(const RowsArgs& args, int part, uint4 (&b)[kBlocks][2]) {
  constexpr int kAtOnce = kWarps < 14 && kBlocks < 10 ? 4 : 2;  // k blocks, as far as registers go
  int begin = part * args.part_blocks, last = min(begin + args.part_blocks, args.k_blocks) - 1;
  const T* weight = static_cast<const T*>(args.norm_weight) + threadIdx.x % 4 * 16;
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
    uint4 by[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // For a block that the warp does not have this loads any weights, since its activations are zeros.
      int block = min(begin + (first + i) * kWarps + static_cast<int>(threadIdx.x) / 32, last);
      const uint4* from = reinterpret_cast<const uint4*>(weight + block * 64);
      by[i][0] = from[0];
      by[i][1] = from[1];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 &four = b[first + i][half], times = by[i][half];
        four = make_uint4(multiply_pairs(four.x, times.x), multiply_pairs(four.y, times.y),
                          multiply_pairs(four.z, times.z), multiply_pairs(four.w, times.w));
      }
    }
  }
}

// Loads the first part's activations and normalises them but for the root of their squares' mean. The squares are those of
// all k; each warp leaves its sums of them in shared memory. meanwhile() runs while the activations are on their way.
template <typename T, int kWarps, int kBlocks, typename Layout, typename Meanwhile>
__device__ __forceinline__ void load_normalised(const RowsArgs& args, char* shared, int part, uint4 (&b)[kBlocks][2],
                                                Meanwhile meanwhile) {
  float squares[4][4] = {};
  for (int other = args.cluster - 1; other >= 0; --other) {
    if (other == part) continue;
    load_activations<T, kWarps, kBlocks>(args, other, b);
    add_squares<T>(squares, b);
  }
  load_activations<T, kWarps, kBlocks>(args, part, b);
  __syncwarp();
  meanwhile();
  add_squares<T>(squares, b);
  int lane = threadIdx.x % 32, g = lane / 4;
  float* mine = reinterpret_cast<float*>(shared + Layout::kSquares) + threadIdx.x / 32 * 8 + g;
  float sum = 0.0f;
#pragma unroll
  for (int chain = 0; chain < 4; ++chain) sum += g % 2 ? squares[chain][1] : squares[chain][0];
  if (lane % 4 == g / 2) *mine = sum;
  multiply_by_norm_weight<T, kWarps, kBlocks>(args, part, b);
}

}  // namespace nf4
