// The A operands of a k step: a stage's codes and scales are loaded to registers, and the table turns codes into operands.
#pragma once

#include "../clock.cuh"
#include "consumer_thread.cuh"
#include "table.cuh"

namespace nf4 {

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

}  // namespace nf4
