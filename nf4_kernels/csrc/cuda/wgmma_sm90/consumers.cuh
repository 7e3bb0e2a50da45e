// The consumer warpgroups of linear_wgmma.cuh: a stage's codes and scales to registers, codes to A operands, wgmma, scales
// on the sums. A k step is four k blocks of 64 k; a k block is four wgmma of 16 k.
#pragma once

#include "../clock.cuh"
#include "epilogue.cuh"
#include "split_tiles.cuh"
#include "table.cuh"

namespace nf4 {

// What of a tile is a thread's, and where that lies in shared memory. Lane (g, t) has rows 2g and 2g + 1 of its warp's 16.
template <typename Traits>
struct ConsumerThread {
  using Layout = WgmmaLayout<Traits>;
  Layout layout;
  int group, row, t;  // row: the first of its two in the tile
  unsigned lane_offset;
  const char* codes;
  int chunk;
  const char* scales;
  unsigned first_tile;
  __device__ __forceinline__ explicit ConsumerThread(const char* shared) : layout{shared_address(shared)} {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    group = threadIdx.x / 128;
    t = lane % 4;
    lane_offset = lane * Traits::kPairBytes;
    row = warp * 16 + g * 2;
    // The stage's chunk of k block i is (2i + t / 2) ^ (row % 8), and row % 8 is 2 (g % 4) or one more.
    codes = shared + Layout::kWeights + row * 128 + t % 2 * 8;
    chunk = (t / 2) ^ (row % 8);
    scales = shared + Layout::kScales + row * 4;
    first_tile = swizzled_tile(layout.tokens(0));
  }
};

// Where a thread is in the rings of stages, and which of the next ones it has already seen full.
template <typename Traits>
struct ConsumerRings {
  using Layout = WgmmaLayout<Traits>;
  Ring<Traits::kStages> weights;
  Ring<Traits::kTokenStages> tokens;
  int released = 0;  // the token stage that is given back next
  bool tokens_full = false, weights_full = false, scales_full = false;

  // Waits for the tokens of k block i; gives their tile's descriptor.
  __device__ __forceinline__ unsigned wait_tokens(const ConsumerThread<Traits>& thread, int i) {
    constexpr int kBlocks = Layout::kTokenBlocks;
    if (i % kBlocks == 0 && !tokens_full) barrier_wait(thread.layout.tokens_full(tokens.stage), tokens.parity);
    unsigned tile =
        thread.first_tile + tokens.stage * (Layout::kTokenBytes >> 4) + i % kBlocks * Traits::kTokens * 8;
    if (i % kBlocks == kBlocks - 1) tokens.advance();
    return tile;
  }
  // Gives a token stage back once k block i, its last, has been multiplied.
  __device__ __forceinline__ void release_tokens(Layout layout, int i) {
    if (i % Layout::kTokenBlocks == Layout::kTokenBlocks - 1) {
      warp_arrive(layout.tokens_empty(released));
      released = released + 1 == Traits::kTokenStages ? 0 : released + 1;
    }
  }
  // Asks, while k block i is multiplied, whether the stages after it are full: the answers are there when they are needed.
  __device__ __forceinline__ void try_wait_ahead(Layout layout, int i) {
    if (i % Layout::kTokenBlocks == Layout::kTokenBlocks - 1) {
      tokens_full = barrier_passed(layout.tokens_full(tokens.stage), tokens.parity);
    }
    if (i == 3) {
      weights_full = barrier_passed(layout.weights_full(weights.stage), weights.parity);
      scales_full = barrier_passed(layout.scales_full(weights.stage), weights.parity);
    }
  }
};

// The registers of a k step: codes and scales as they were loaded, and the A operands of two k blocks.
template <typename Traits>
struct Operands {
  using T = typename Traits::T;
  using Layout = WgmmaLayout<Traits>;
  using Pair = std::conditional_t<Traits::kHalfCodes, __half2, float2>;
  uint2 upper[4], lower[4];  // codes of the thread's two rows, [k block]
  float2 scale[4];
  unsigned a[2][4][4];  // [k block % 2][16 k]
  Pair pairs[Traits::kScaledWeights ? 4 : 1][4];

  // Loads the next stage's codes and scales, and gives the stage back.
  template <typename Clock>
  __device__ __forceinline__ void load_stage(const ConsumerThread<Traits>& thread, ConsumerRings<Traits>& rings,
                                             Clock& decoding) {
    auto& ring = rings.weights;
    if (!rings.weights_full) barrier_wait(thread.layout.weights_full(ring.stage), ring.parity);
    decoding.resume();
    const char* rows = thread.codes + ring.stage * Layout::kWeightBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = *reinterpret_cast<const uint2*>(rows + ((thread.chunk ^ 2 * i) << 4));
      lower[i] = *reinterpret_cast<const uint2*>(rows + 128 + ((thread.chunk ^ 1 ^ 2 * i) << 4));
    }
    decoding.pause(lower[3].y);
    if (!rings.scales_full) barrier_wait(thread.layout.scales_full(ring.stage), ring.parity);
    decoding.resume();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* from = thread.scales + ring.stage * Layout::kScaleBytes + i * Layout::kRows * 4;
      scale[i] = *reinterpret_cast<const float2*>(from);
    }
    decoding.pause(scale[3].y);
    fence_loads_before_copies();
    barrier_arrive(thread.layout.weights_empty(ring.stage));
    ring.advance();
  }
  // Turns 16 k of k block i into an A operand.
  template <typename Clock>
  __device__ __forceinline__ void decode(int i, int s, unsigned lane_offset, Clock& decoding) {
    unsigned up = s < 2 ? upper[i].x : upper[i].y, low = s < 2 ? lower[i].x : lower[i].y;
    int byte = s % 2 * 2;
    decoding.resume();
    a[i % 2][s][0] = table_entry(up, byte, lane_offset);
    a[i % 2][s][1] = table_entry(low, byte, lane_offset);
    a[i % 2][s][2] = table_entry(up, byte + 1, lane_offset);
    a[i % 2][s][3] = table_entry(low, byte + 1, lane_offset);
    decoding.pause(a[i % 2][s]);
  }
  // Where weights are scaled before they are rounded, a k block is decoded in two stages: all its lookups go ahead of its
  // neighbour's wgmma, which hold the warp, and the rounding comes behind them.
  template <typename Clock>
  __device__ __forceinline__ void look_up(int i, unsigned lane_offset, Clock& decoding) {
    decoding.resume();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      unsigned up = s < 2 ? upper[i].x : upper[i].y, low = s < 2 ? lower[i].x : lower[i].y;
      int byte = s % 2 * 2;
      table_pair(pairs[s][0], up, byte, lane_offset);
      table_pair(pairs[s][1], low, byte, lane_offset);
      table_pair(pairs[s][2], up, byte + 1, lane_offset);
      table_pair(pairs[s][3], low, byte + 1, lane_offset);
    }
    decoding.pause(as_floats(pairs[Traits::kScaledWeights ? 3 : 0][3]).y);
  }
  template <typename Clock>
  __device__ __forceinline__ void scale_and_round(int i, Clock& decoding) {
    decoding.resume();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float by = j % 2 ? scale[i].y : scale[i].x;
        if (Traits::kHalfCodes) by *= 1 / kHalfStretch;
        float2 codes = as_floats(pairs[s][j]);
        a[i % 2][s][j] = pack2<T>(codes.x * by, codes.y * by);
      }
    }
    decoding.pause(a[i % 2][3]);
  }
  // Loads a stage and decodes its first k block.
  template <typename Clock>
  __device__ __forceinline__ void decode_first(const ConsumerThread<Traits>& thread, ConsumerRings<Traits>& rings,
                                               Clock& decoding) {
    load_stage(thread, rings, decoding);
    if constexpr (Traits::kScaledWeights) {
      look_up(0, thread.lane_offset, decoding);
      scale_and_round(0, decoding);
    } else {
#pragma unroll
      for (int s = 0; s < 4; ++s) decode(0, s, thread.lane_offset, decoding);
    }
  }
};

// Adds kPart of the sums of one k block, times their rows' scales.
template <int kCount, int kPart>
__device__ __forceinline__ void add_scaled(float (&total)[kCount], const float (&sums)[kCount], float2 scale,
                                           int first) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    total[first + i] += ((first + i) % 4 < 2 ? scale.x : scale.y) * sums[first + i];
  }
}

// One k step where weights are scaled: every wgmma accumulates in the tile's sums. The next k block is decoded meanwhile; a
// wgmma holds its warp until the one before has begun. more: this is not the tile's last k step.
template <typename Traits, typename Clock>
__device__ __forceinline__ void multiply_scaled_weights(const ConsumerThread<Traits>& thread,
                                                        ConsumerRings<Traits>& rings, Operands<Traits>& operands,
                                                        float (&total)[Traits::kSums], bool first, bool more,
                                                        Clock& decoding) {
  static_assert(!Traits::kPingPong, "ping-pong is for scaled sums alone");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned tile = rings.wait_tokens(thread, i);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      wgmma_fence();
      wgmma<typename Traits::T, Traits::kTokens>(total, operands.a[i % 2][s], descriptor(tile + s * 2), true);
      wgmma_commit();
      if (s == 0) {
        rings.try_wait_ahead(thread.layout, i);
        wgmma_wait<1>();
        if (i > 0) {
          rings.release_tokens(thread.layout, i - 1);
        } else if (!first) {
          rings.release_tokens(thread.layout, 3);
        }
        if (i == 3 && more) operands.load_stage(thread, rings, decoding);
        if (i < 3 || more) operands.look_up((i + 1) % 4, thread.lane_offset, decoding);
      }
      if (s == 3 && (i < 3 || more)) operands.scale_and_round((i + 1) % 4, decoding);
    }
  }
}

// One k step where sums are scaled: the wgmma of each k block have accumulators of their own, which are added to the tile's
// sums, times the scales. Between two wgmma the next k block's operands are decoded, as a wgmma holds its warp until the one
// before has begun; with double-buffered sums those of the k block before are added there, too.
template <typename Traits, typename Clock>
__device__ __forceinline__ void multiply_scaled_sums(const ConsumerThread<Traits>& thread,
                                                     ConsumerRings<Traits>& rings, Operands<Traits>& operands,
                                                     float (&total)[Traits::kSums], bool more, Clock& decoding) {
  constexpr int kCount = Traits::kSums;
  constexpr bool kDouble = Traits::kDoubleBuffered, kPingPong = Traits::kPingPong;
  float sums[kDouble ? 2 : 1][kCount];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned tile = rings.wait_tokens(thread, i);
    if (kPingPong) barrier_sync(kPingPongBarrier + thread.group, 256);
    const int kNow = kDouble ? i % 2 : 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      wgmma_fence();
      wgmma<typename Traits::T, Traits::kTokens>(sums[kNow], operands.a[i % 2][s], descriptor(tile + s * 2), s > 0);
      wgmma_commit();
      if (s == 0) rings.try_wait_ahead(thread.layout, i);
      if constexpr (kDouble) if (i > 0) {
        if (s == 0) {
          wgmma_wait<1>();
          pin(sums[(i + 1) % 2]);
          rings.release_tokens(thread.layout, i - 1);
        }
        decoding.resume();
        add_scaled<kCount, kCount / 4>(total, sums[(i + 1) % 2], operands.scale[(i + 3) % 4], s * (kCount / 4));
        decoding.pause(total[(s + 1) * (kCount / 4) - 1]);
      }
      if (i < 3) operands.decode(i + 1, s, thread.lane_offset, decoding);
    }
    if (kPingPong) {
      wgmma_wait<2>();
      barrier_signal(kPingPongBarrier + (thread.group + 1) % Traits::kGroups, 256);
    }
    float2 by = operands.scale[i];
    if (i == 3 && more) operands.decode_first(thread, rings, decoding);
    if (!kDouble || i == 3) {
      wgmma_wait<0>();
      pin(sums[kNow]);
      rings.release_tokens(thread.layout, i);
      decoding.resume();
      add_scaled<kCount, kCount>(total, sums[kNow], by, 0);
      decoding.pause(total[kCount - 1]);
    }
  }
}

// This block's k steps of a tile.
template <typename Traits, typename Clock>
__device__ __forceinline__ void multiply_tile(const ConsumerThread<Traits>& thread, ConsumerRings<Traits>& rings,
                                              Operands<Traits>& operands, float (&total)[Traits::kSums], int steps,
                                              Clock& decoding) {
#pragma unroll
  for (int i = 0; i < Traits::kSums; ++i) total[i] = 0.0f;
  rings.weights_full = rings.scales_full = false;
  operands.decode_first(thread, rings, decoding);
  for (int step = 0; step < steps; ++step) {
    bool more = step + 1 < steps;
    if constexpr (Traits::kScaledWeights) {
      multiply_scaled_weights<Traits>(thread, rings, operands, total, step == 0, more, decoding);
    } else {
      multiply_scaled_sums<Traits>(thread, rings, operands, total, more, decoding);
    }
  }
  if constexpr (Traits::kScaledWeights) {
    wgmma_wait<0>();
    pin(total);
    rings.release_tokens(thread.layout, 3);
  }
}

// Stores a tile's sums for the block that reduces them; or, in that block, reduces them and writes the output.
template <typename Traits>
__device__ __forceinline__ void finish_tile(const WgmmaArgs& args, const TileScheduler& work, const char* shared,
                                            const ConsumerThread<Traits>& thread, ConsumerRings<Traits>& rings,
                                            float (&total)[Traits::kSums]) {
  int row = work.tile / args.token_tiles * Traits::kRows + thread.row;
  int token = work.tile % args.token_tiles * Traits::kTokens + thread.t * 2;
  if (work.first_step > 0) {
    store_partial_sums<Traits>(args, work.tile, thread.group, total);
    return;
  }
  Residual<Traits> rest;
  if (!Traits::kGates && Residual<Traits>::kAhead && args.residual && is_paired(args, row)) {
    rest.load(args, row, token, 0);
  }
  if (work.steps < args.steps) {
    if constexpr (PartialSumRing<Traits>::kOfTokens) {
      reduce_partial_sums<Traits>(args, work.tile, shared, thread.layout, rings.tokens, total);
    } else {
      reduce_partial_sums<Traits>(args, work.tile, shared, thread.layout, rings.weights, total);
    }
  }
  if constexpr (Traits::kGates) {
    write_gated<Traits>(args, row, token, total);
  } else if (args.residual) {
    write_tile<Traits, true>(args, row, token, total, rest);
  } else {
    write_tile<Traits, false>(args, row, token, total, rest);
  }
}

// kTimed: threads take the times of their decoding: codes and scales loaded, turned into operands, scales put on the sums.
template <typename Traits, bool kTimed>
__device__ __forceinline__ void consume(const WgmmaArgs& args, const char* shared) {
  ConsumerThread<Traits> thread(shared);
  TileScheduler work(args);
  ConsumerRings<Traits> rings;
  Operands<Traits> operands;
  StageClock<kTimed> decoding;
  decoding.begin(args.clock);
  // Ping-pong: side by side, the warpgroups' wgmma would end, and their decoding begin, at the same time.
  if (Traits::kPingPong && thread.group == Traits::kGroups - 1) barrier_signal(kPingPongBarrier, 256);
  while (work.advance(args)) {
    float total[Traits::kSums];
    multiply_tile<Traits>(thread, rings, operands, total, work.steps, decoding);
    finish_tile<Traits>(args, work, shared, thread, rings, total);
  }
  if (threadIdx.x % 128 == 0) clock_end(args.clock);
  decoding.end(args.clock);
}

}  // namespace nf4
