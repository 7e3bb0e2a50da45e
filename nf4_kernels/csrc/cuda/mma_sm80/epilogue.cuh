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

// Adds up and writes units of a split tile, kAtOnce at a time, in the order of k. of_first: the sums of the thread block that has its
// first part, of_others: those of the others, kBlockSums apart.
template <int kAtOnce, typename T, typename Shape>
__device__ __forceinline__ void add_units(const MmaArgs& args, const Writer<T, MmaArgs>& writer, int unit, int end, int parts,
                                          const float4* of_first, const float4* of_others) {
  constexpr int kOthers = 8 / kAtOnce;  // whose sums are read at once
  constexpr int64_t kBlockSums = int64_t{Shape::kParts} * kUnits<Shape> * Shape::kThreads;
#pragma unroll 1
  for (; unit < end; unit += kAtOnce) {
    float4 sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (unit + i < end) sum[i] = __ldcg(of_first + (unit + i) * Shape::kThreads);
    }
#pragma unroll 1
    for (int other = 1; other < parts; other += kOthers) {
      float4 more[kOthers][kAtOnce];
#pragma unroll
      for (int o = 0; o < kOthers; ++o) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          bool has = other + o < parts && unit + i < end;
          if (has) more[o][i] = __ldcg(of_others + (other + o) * kBlockSums + (unit + i) * Shape::kThreads);
        }
      }
#pragma unroll
      for (int o = 0; o < kOthers; ++o) {
        if (other + o >= parts) break;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sum[i].x += more[o][i].x;
          sum[i].y += more[o][i].y;
          sum[i].z += more[o][i].z;
          sum[i].w += more[o][i].w;
        }
      }
    }
#pragma unroll 1
    for (int i = 0; i < kAtOnce && unit + i < end; ++i) {
      writer.write(args, (unit + i) / Shape::kTiles, (unit + i) % Shape::kTiles, sum[0]);
#pragma unroll
      for (int j = 1; j < kAtOnce; ++j) sum[j - 1] = sum[j];
    }
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
  const float4* of_first = partial_sums<Shape>(args, first, tile);
  // The other thread blocks begin with this tile.
  const float4* of_others = args.partials + int64_t{first} * Shape::kParts * kUnits<Shape> * Shape::kThreads + threadIdx.x;
  Writer<T, MmaArgs> writer = writer_of<T, Shape>(args, MmaStep(args, tile * args.k_steps));
  // Few parts, of which a thread block adds up many units, or many parts.
  if (parts <= 5) {
    add_units<4, T, Shape>(args, writer, unit, end, parts, of_first, of_others);
  } else {
    add_units<1, T, Shape>(args, writer, unit, end, parts, of_first, of_others);
  }
  // The last of all leaves the counter zero.
  if (threadIdx.x == 0 && before == (parts - 1) * kReduced + parts) *counter = 0;
}

}  // namespace nf4
