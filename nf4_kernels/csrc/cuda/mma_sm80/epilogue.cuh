// The reduction of split tiles in linear_mma.cuh.
#pragma once

#include "layout.cuh"
#include "writer.cuh"

namespace nf4 {

template <typename T, typename Shape>
__device__ __forceinline__ Writer<T, MmaArgs> writer_of(const MmaArgs& args, const MmaStep& at) {
  return {args, Shape::first_row_tile(at), Shape::first_token(at)};
}

// Partial sums of a split tile are kept in units of a float4 of each thread.
template <typename Shape>
constexpr int kUnits = Shape::kRowTiles * Shape::kTiles;

// The place of a thread block's partial sums of a tile: where it may have parts of two, the one that it begins with is first.
template <typename Shape>
__device__ __forceinline__ float4* partial_sums(const MmaArgs& args, int block, int tile) {
  bool begins_with = args.first_step(block) / args.k_steps == tile;
  return args.partials + int64_t{block * Shape::kParts + !begins_with} * kUnits<Shape> * Shape::kThreads + threadIdx.x;
}

// A split tile's counter: one for each thread block that has left its sums, and so much for each that waits for none any more.
// They are apart because one without a share of the reduction does not wait until others have left theirs.
constexpr int kReduced = 1 << 16;

// Leaves a split tile's partial sums in memory and says so.
template <typename Shape>
__device__ __forceinline__ void leave_sums(const MmaArgs& args, int tile,
                                           const float (&acc)[Shape::kRowTiles][Shape::kTiles][4]) {
  float4* to = partial_sums<Shape>(args, blockIdx.x, tile);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kTiles; ++j) {
      const float(&sum)[4] = acc[i][j];
      __stcg(to + (i * Shape::kTiles + j) * Shape::kThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(args.counters + tile) : "memory");
  }
}

// Adds the partial sums of a split tile, each of its thread blocks an equal share of them, in the order of k. All thread
// blocks run at the same time (a cooperative launch), and none waits before it has left its own sums.
template <typename T, typename Shape>
__device__ __noinline__ void reduce_tile(const MmaArgs& args, int tile) {
  int first = args.block_of(tile * args.k_steps), last = args.block_of((tile + 1) * args.k_steps - 1);
  int parts = last - first + 1, part = blockIdx.x - first;
  int* counter = args.counters + tile;
  int unit = part * kUnits<Shape> / parts, end = (part + 1) * kUnits<Shape> / parts;
  if (threadIdx.x == 0 && unit < end) {
    int there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    } while (there % kReduced < parts);
  }
  __syncthreads();
  int before = threadIdx.x == 0 ? atomicAdd(counter, kReduced) : 0;
  constexpr int64_t kBlockSums = int64_t{Shape::kParts} * kUnits<Shape> * Shape::kThreads;
  const float4* of_first = partial_sums<Shape>(args, first, tile);
  // The other thread blocks begin with this tile.
  const float4* of_others = args.partials + first * kBlockSums + threadIdx.x;
  Writer<T, MmaArgs> writer = writer_of<T, Shape>(args, MmaStep(args, tile * args.k_steps));
#pragma unroll 1
  for (; unit < end; ++unit) {
    float4 sum = __ldcg(of_first + unit * Shape::kThreads);
    const float4* from = of_others + unit * Shape::kThreads;
#pragma unroll 1
    for (int first_other = 1; first_other < parts; first_other += 8) {
      float4 more[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first_other + i < parts) more[i] = __ldcg(from + (first_other + i) * kBlockSums);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first_other + i >= parts) break;
        sum.x += more[i].x;
        sum.y += more[i].y;
        sum.z += more[i].z;
        sum.w += more[i].w;
      }
    }
    writer.write(args, unit / Shape::kTiles, unit % Shape::kTiles, sum);
  }
  // The last of all leaves the counter zero.
  if (threadIdx.x == 0 && before == (parts - 1) * kReduced + parts) *counter = 0;
}

}  // namespace nf4
