// Tiles of linear_wgmma.cuh whose k steps several thread blocks share: their partial sums go through the workspace.
//
// A split tile is reduced by the thread block that has its first k step; the others store their partial sums and go on.
// The tile is the reducing block's last one and the others' first (or only) one, so the reducing block hardly ever
// waits. It waits only for blocks that were started before it (TileScheduler deals work out from the line's end), so it
// never waits forever.
#pragma once

#include "layout.cuh"
#include "scheduler.cuh"

namespace nf4 {

// Where a thread block's and warpgroup's partial sums lie in the workspace: a thread's come four by four.
template <typename Traits>
__device__ __forceinline__ float4* partial_sums(const WgmmaArgs& args, int block, int group) {
  int64_t place = TileScheduler::line() * static_cast<int>(gridDim.x) + block;
  return args.partial + (place * Traits::kGroups + group) * (Traits::kSums / 4) * 128;
}

// Stores a warpgroup's partial sums and counts them.
template <typename Traits>
__device__ __forceinline__ void store_partial_sums(const WgmmaArgs& args, int tile, int group,
                                                   const float (&sum)[Traits::kSums]) {
  float4* mine = partial_sums<Traits>(args, TileScheduler::index(), group) + threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < Traits::kSums; i += 4) {
    __stcg(mine + i / 4 * 128, make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
  }
  barrier_sync(kGroupBarrier + group, 128);
  if (threadIdx.x % 128 == 0) {
    int* counter = args.counters + tile * Traits::kGroups + group;
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
  }
}

// How many other blocks have partial sums of the tile that is this block's last.
__device__ __forceinline__ int count_others(const WgmmaArgs& args, int tile) {
  int block = TileScheduler::index(), end = (tile + 1) * args.steps, others = 0;
  while (TileScheduler::start(args, block + others + 1) < end) ++others;
  return others;
}

// The ring through which partial sums come to the reducing block, behind its last weights or tokens: it is the one of the
// two whose stages are larger.
template <typename Traits>
struct PartialSumRing {
  using Layout = WgmmaLayout<Traits>;
  static constexpr bool kOfTokens = Traits::kTokens >= 128;
  static constexpr int kStages = kOfTokens ? Traits::kTokenStages : Traits::kStages;
  static constexpr int kStageBytes = kOfTokens ? Layout::kTokenBytes : Layout::kWeightBytes;
  static constexpr int kFit = kStageBytes / (Traits::kGroups * 512) / 4;  // float4 of a thread's sums in a stage
  static constexpr int kChunks = (Traits::kSums / 4 + kFit - 1) / kFit;
  static constexpr int kChunk = (Traits::kSums / 4 + kChunks - 1) / kChunks * 4;  // sums; the last chunk may have fewer
  static_assert(Traits::kSums % 4 == 0, "a thread's sums are whole float4");
  static constexpr int kOffset = kOfTokens ? Layout::kActivations : Layout::kWeights;
  __device__ static unsigned full(Layout layout, int stage) {
    return kOfTokens ? layout.tokens_full(stage) : layout.weights_full(stage);
  }
  // The weights or tokens have left the stage.
  __device__ static unsigned empty(Layout layout, int stage) {
    return kOfTokens ? layout.tokens_empty(stage) : layout.weights_empty(stage);
  }
  // The partial sums have left the stage.
  __device__ static unsigned reduced(Layout layout, int stage) {
    return kOfTokens ? layout.sums_empty(stage) : layout.weights_empty(stage);
  }
  __device__ static unsigned place(Layout layout, int stage) {
    return kOfTokens ? layout.tokens(stage) : layout.weights(stage);
  }
};

// Waits, in a producer thread, until all partial sums of the tile are there, and sets their counters back to zero.
template <typename Traits>
__device__ __forceinline__ void wait_for_partial_sums(const WgmmaArgs& args, int tile, int others) {
  grid_dependency_wait();  // since the launch in front counts with the same counters
#pragma unroll
  for (int group = 0; group < Traits::kGroups; ++group) {
    int* counter = args.counters + tile * Traits::kGroups + group;
    int there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    } while (there != others);
    *counter = 0;
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Loads them through the ring's stages while the consumers multiply the last weights.
template <typename Traits, int kStages>
__device__ __forceinline__ void load_partial_sums(const WgmmaArgs& args, int tile, WgmmaLayout<Traits> layout,
                                                  Ring<kStages> ring) {
  using Partials = PartialSumRing<Traits>;
  int others = count_others(args, tile), first = TileScheduler::index() + 1;
  wait_for_partial_sums<Traits>(args, tile, others);
  int loaded = 0;
  for (int other = first; other < first + others; ++other) {
    for (int at = 0; at < Traits::kSums; at += Partials::kChunk) {
      int round = loaded++ / kStages;
      bool again = Partials::kOfTokens && round > 0;
      barrier_wait(again ? Partials::reduced(layout, ring.stage) : Partials::empty(layout, ring.stage),
                   again ? (round - 1) & 1 : ring.parity ^ 1);
      unsigned full = Partials::full(layout, ring.stage), bytes = min(Partials::kChunk, Traits::kSums - at) * 512;
      expect_bytes(full, Traits::kGroups * bytes);
#pragma unroll
      for (int group = 0; group < Traits::kGroups; ++group) {
        const float4* from = partial_sums<Traits>(args, other, group) + at / 4 * 128;
        copy_bytes(Partials::place(layout, ring.stage) + group * Partials::kChunk * 512, from, bytes, full);
      }
      ring.advance();
    }
  }
}

// Adds what load_partial_sums() loads to the reducing block's own sums, in the order of k.
template <typename Traits, int kStages>
__device__ __forceinline__ void reduce_partial_sums(const WgmmaArgs& args, int tile, const char* shared,
                                                    WgmmaLayout<Traits> layout, Ring<kStages>& ring,
                                                    float (&sum)[Traits::kSums]) {
  using Partials = PartialSumRing<Traits>;
  for (int others = count_others(args, tile); others > 0; --others) {
#pragma unroll
    for (int at = 0; at < Traits::kSums; at += Partials::kChunk) {
      barrier_wait(Partials::full(layout, ring.stage), ring.parity);
      const float4* from =
          reinterpret_cast<const float4*>(shared + Partials::kOffset + ring.stage * Partials::kStageBytes) +
          threadIdx.x / 128 * (Partials::kChunk / 4) * 128 + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < Partials::kChunk && at + i < Traits::kSums; i += 4) {
        float4 partial = from[i / 4 * 128];
        sum[at + i] += partial.x;
        sum[at + i + 1] += partial.y;
        sum[at + i + 2] += partial.z;
        sum[at + i + 3] += partial.w;
      }
      fence_loads_before_copies();
      barrier_arrive(Partials::reduced(layout, ring.stage));
      ring.advance();
    }
  }
}

}  // namespace nf4
