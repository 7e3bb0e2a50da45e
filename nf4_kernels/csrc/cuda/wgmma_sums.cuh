// What becomes of linear_wgmma.cuh's sums: written out, or for a tile that is cut between blocks, brought together.
#pragma once

#include "wgmma_layout.cuh"

namespace nf4 {

// Whether two rows' sums of a token lie in one aligned word of the output.
__device__ __forceinline__ bool is_paired(const WgmmaArgs& args, int row) { return row + 1 < args.n && args.n % 2 == 0; }

// A thread's pairs of the residual, [token pair][token] as in write_tile().
template <int kTokens>
struct Residual {
  // As far as registers go, all are asked for ahead; else each so many as the sums before them are written.
  static constexpr bool kAhead = kTokens <= 64;
  static constexpr int kAtOnce = kAhead ? kTokens / 4 : 8;
  unsigned pairs[kAtOnce];
  // Of tokens beyond the last, that one's.
  template <typename T>
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int token, int from) {
    const T* residual = static_cast<const T*>(args.residual) + row;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t place = int64_t{min(token + (from + i) / 2 * 8 + i % 2, args.m - 1)} * args.n;
      pairs[i] = load_fresh(reinterpret_cast<const unsigned*>(residual + place));
    }
  }
};

// Adds bias, with kAdds the residual, rounds once and writes a warpgroup's 64 rows x kTokens tokens.
template <typename T, int kTokens, bool kScaled, bool kAdds>
__device__ __forceinline__ void write_tile(const WgmmaArgs& args, int row, int token, const float (&sum)[kTokens / 2],
                                           Residual<kTokens>& rest) {
  if (row >= args.n) return;
  const T* bias = static_cast<const T*>(args.bias);
  bool both = row + 1 < args.n;
  constexpr float kUnit = kScaled ? 1.0f : kShrink<T>;
  float add0 = bias ? to_float(bias[row]) : 0.0f, add1 = bias && both ? to_float(bias[row + 1]) : 0.0f;
  int64_t first = int64_t{token} * args.n + row, next = args.n, next_pair = int64_t{args.n} * 8;
  T* at = static_cast<T*>(args.out) + first;
  if (is_paired(args, row)) {
    constexpr int kAtOnce = Residual<kTokens>::kAtOnce;
#pragma unroll
    for (int i = 0; i < kTokens / 4; i += 2, at += next_pair) {
      if (kAdds && !Residual<kTokens>::kAhead && i % kAtOnce == 0) rest.template load<T>(args, row, token, i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 more = kAdds ? unpack2<T>(rest.pairs[(i + j) % kAtOnce]) : make_float2(0.0f, 0.0f);
        float low = fmaf(sum[i * 2 + j], kUnit, add0 + more.x), high = fmaf(sum[i * 2 + j + 2], kUnit, add1 + more.y);
        if (token + i * 4 + j < args.m) *reinterpret_cast<unsigned*>(at + j * next) = pack2<T>(low, high);
      }
    }
    return;
  }
  const T* residual = static_cast<const T*>(args.residual) + (kAdds ? first : 0);
#pragma unroll
  for (int i = 0; i < kTokens / 2; i += 4, at += next_pair) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (token + i * 2 + j >= args.m) return;
      T* to = at + j * next;
      const T* from = residual + i / 4 * next_pair + j * next;
      float2 more = make_float2(0.0f, 0.0f);
      if (kAdds) more.x = to_float(load_fresh(from));
      if (kAdds && both) more.y = to_float(load_fresh(from + 1));
      to[0] = from_float<T>(fmaf(sum[i + j], kUnit, add0 + more.x));
      if (both) to[1] = from_float<T>(fmaf(sum[i + j + 2], kUnit, add1 + more.y));
    }
  }
}

// The same where rows are gates and ups in turns. Two neighbouring lanes' columns make a word: the even one writes that of
// the first token of two, the odd one that of the second. All of a warp's rows are there, or none.
template <typename T, int kTokens, bool kScaled>
__device__ __forceinline__ void write_gated(const WgmmaArgs& args, int row, int token,
                                            const float (&sum)[kTokens / 2]) {
  const T* bias = static_cast<const T*>(row < args.n ? args.bias : nullptr);
  constexpr float kUnit = kScaled ? 1.0f : kShrink<T>;
  int column = row / 2, limit = row < args.n ? args.m : 0;
  float add0 = bias ? to_float(bias[column]) : 0.0f, add1 = bias ? to_float(bias[column + args.gate.columns]) : 0.0f;
  bool odd = column % 2;
  token += odd;
  T* out = static_cast<T*>(args.out) + args.gate.place(token, column - odd);
#pragma unroll
  for (int i = 0; i < kTokens / 2; i += 4) {
    auto two = [&](int from, float add) { return pack2<T>(fmaf(sum[from], kUnit, add), fmaf(sum[from + 1], kUnit, add)); };
    unsigned both = args.gate.of(two(i, add0), two(i + 2, add1));
    unsigned others = __shfl_xor_sync(~0u, both, 4);
    unsigned word = __byte_perm(both, others, odd ? 0x3276 : 0x5410);
    if (token + i * 2 < limit) *reinterpret_cast<unsigned*>(out + args.gate.further(i * 2)) = word;
  }
}

// A tile that is cut belongs to the block that has its first unit; the others hand their parts over and go on. That
// block comes to the tile last of its run, the others first of theirs (or only), so it hardly ever waits; and it waits
// only for blocks that were started before it (runs are dealt out from the line's end), so it never waits forever.
template <int kCount, int kGroups>
__device__ __forceinline__ float4* part_of(const WgmmaArgs& args, int run, int group) {
  int64_t place = WgmmaRun::line() * static_cast<int>(gridDim.x) + run;
  return args.partial + (place * kGroups + group) * (kCount / 4) * 128;
}

// Writes a part and tells the owner.
template <int kCount, int kGroups>
__device__ __forceinline__ void hand_over(const WgmmaArgs& args, int tile, int group, const float (&sum)[kCount]) {
  float4* mine = part_of<kCount, kGroups>(args, WgmmaRun::index(), group) + threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    __stcg(mine + i / 4 * 128, make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
  }
  barrier_sync(1 + group, 128);
  if (threadIdx.x % 128 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(args.counters + tile * kGroups + group) : "memory");
  }
}

// How many other blocks have parts of the tile that is last in this block's run.
__device__ __forceinline__ int parts_of(const WgmmaArgs& args, int tile) {
  int run = WgmmaRun::index(), end = (tile + 1) * args.steps, others = 0;
  while (WgmmaRun::start(args, run + others + 1) < end) ++others;
  return others;
}

// The ring through which parts come, behind the last weights or tokens: the one that holds more.
template <typename Layout, int kTokens, int kGroups>
struct PartRing {
  static constexpr bool kOfTokens = kTokens >= 128;
  static constexpr int kStageBytes = kOfTokens ? Layout::kTokenBytes : Layout::kWeightBytes;
  static constexpr int kFit = kStageBytes / (kGroups * 512);
  static constexpr int kChunk = kFit < kTokens / 2 ? kFit : kTokens / 2;  // sums of a thread in a stage
  static constexpr int kOffset = kOfTokens ? Layout::kActivations : Layout::kWeights;
  __device__ static unsigned full(Layout at, int stage) {
    return kOfTokens ? at.tokens_full(stage) : at.weights_full(stage);
  }
  // What the ring is for has left the stage; sums have.
  __device__ static unsigned empty(Layout at, int stage) {
    return kOfTokens ? at.tokens_empty(stage) : at.weights_empty(stage);
  }
  __device__ static unsigned added(Layout at, int stage) {
    return kOfTokens ? at.sums_empty(stage) : at.weights_empty(stage);
  }
  __device__ static unsigned place(Layout at, int stage) { return kOfTokens ? at.tokens(stage) : at.weights(stage); }
};

// Brings them, as soon as all are there, through the ring's stages, while the last weights are multiplied.
template <int kTokens, int kGroups, typename Layout, int kStages>
__device__ __forceinline__ void bring_parts(const WgmmaArgs& args, int tile, Layout layout, Ring<kStages> ring) {
  constexpr int kCount = kTokens / 2;
  using Parts = PartRing<Layout, kTokens, kGroups>;
  int others = parts_of(args, tile), first = WgmmaRun::index() + 1;
  wait_for_previous();  // which counts with the same counters
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    int* counter = args.counters + tile * kGroups + group;
    int there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    } while (there != others);
    *counter = 0;
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  constexpr int kBytes = Parts::kChunk * 512;
  int brought = 0;
  for (int other = first; other < first + others; ++other) {
    for (int at = 0; at < kCount; at += Parts::kChunk) {
      int round = brought++ / kStages;
      bool again = Parts::kOfTokens && round > 0;
      barrier_wait(again ? Parts::added(layout, ring.stage) : Parts::empty(layout, ring.stage),
                   again ? (round - 1) & 1 : ring.parity ^ 1);
      unsigned full = Parts::full(layout, ring.stage);
      expect_bytes(full, kGroups * kBytes);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float4* from = part_of<kCount, kGroups>(args, other, group) + at / 4 * 128;
        copy_bytes(Parts::place(layout, ring.stage) + group * kBytes, from, kBytes, full);
      }
      ring.advance();
    }
  }
}

// Adds what bring_parts() brings to the owner's sums, in the blocks' order.
template <int kTokens, int kGroups, typename Layout, int kStages>
__device__ __forceinline__ void add_parts(const WgmmaArgs& args, int tile, const char* shared, Layout layout,
                                          Ring<kStages>& ring, float (&sum)[kTokens / 2]) {
  using Parts = PartRing<Layout, kTokens, kGroups>;
  for (int others = parts_of(args, tile); others > 0; --others) {
#pragma unroll
    for (int at = 0; at < kTokens / 2; at += Parts::kChunk) {
      barrier_wait(Parts::full(layout, ring.stage), ring.parity);
      const float4* from = reinterpret_cast<const float4*>(shared + Parts::kOffset + ring.stage * Parts::kStageBytes) +
                           threadIdx.x / 128 * (Parts::kChunk / 4) * 128 + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < Parts::kChunk; i += 4) {
        float4 part = from[i / 4 * 128];
        sum[at + i] += part.x;
        sum[at + i + 1] += part.y;
        sum[at + i + 2] += part.z;
        sum[at + i + 3] += part.w;
      }
      loads_before_copies();
      barrier_arrive(Parts::added(layout, ring.stage));
      ring.advance();
    }
  }
}

}  // namespace nf4
