// GEMM of many tokens with an NF4 weight on mma.sync, from Ampere on.
//
// A tile is 256 weight rows (the m of mma m16n8k16) x 80 to 128 tokens. It is one thread block's, or its k steps of 64
// are divided evenly among some. A warp has 64 of its rows and half of its tokens: two read each code and four each
// activation, so that shared memory is less busy than the tensor cores.
//   codes and activations come by cp.async
//   a byte is two neighbouring k of a row, which is one A register: a table of 256 entries has it, with a copy for each bank
//   32 k are decoded while those before are multiplied
//   sums are kept in units of the latest scale, in float32
//
// Within 32 k, lane t of a quad takes weights 8t..8t+7 (4 contiguous bytes), and the activations are picked to match.
#pragma once

#include "loads.cuh"
#include "warp.cuh"

namespace nf4 {

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) linear_mma_wide(const __grid_constant__ MmaArgs args) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if (base != kSharedBase) __trap();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(args.clock);
  int first = args.first_step(blockIdx.x);
  unsigned count = args.first_step(blockIdx.x + 1) - first;
  MmaStep at(args, first);
  if (threadIdx.x < 8) barrier_init(base + Shape::kBarriers + threadIdx.x * 8, threadIdx.x < 4 ? Shape::kThreads : Shape::kWarps);
  // Thread blocks of different rows begin with different k.
  unsigned begin = at.row_tile * count / ((args.n + Shape::kRows - 1) / Shape::kRows);
  WideLoader<T, Shape> loader(args, base, at, begin);
  WideScales<Shape> scales(args, at, begin);
  copy_scale_code(args.weight, base + Shape::kScaleCode, Shape::kThreads);
  __syncthreads();
  loader.load_codes(0, count);
  loader.load_tokens(args, base, 0, 0, count);
  loader.load_codes(1, count);
  loader.load_tokens(args, base, 0, 1, count);
  copies_commit();
  fill_table<T>(shared, Shape::kThreads);
  copies_wait<0>();
  __syncthreads();

  WideWarp<T, Shape> warp(base);
  scales.load(args, shared, count);
#pragma unroll
  for (int index = 0; index < 2; ++index) {
    scales.advance(shared, index, count);
    scales.load(args, shared, count);
  }
  __syncthreads();
  float ratio[Shape::kRowTiles * 2];
#pragma unroll 1
  for (unsigned index = 0; index < count; ++index) {
    warp.read_ratios(ratio, index);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      warp.half_step(index, half, ratio, [&]() {
        // What the half step before the last one read is overwritten.
        barrier_wait(Shape::read(base, index + 1, half), Shape::parity(index - 1));
        loader.load_tokens(args, base, index + 1, half, count);
        if (half == 0) {
          loader.load_codes(index + 2, count);
        } else {
          scales.advance(shared, index + 2, count);
          scales.load(args, shared, count);
        }
      });
    }
  }
  copies_wait<0>();
  __syncthreads();
  warp.read_ratios(ratio, count);
  warp.scale(ratio);
  if (args.parts > 1) {
    leave_sums<Shape>(args, at.tile(args), warp.acc);
    reduce_tile<T, Shape>(args, at.tile(args));
  } else {
    warp.write(args, at, shared);
  }
  if (threadIdx.x == 0) clock_end(args.clock);
#endif
}

}  // namespace nf4
