// The sums of a tile: the wgmma of its k steps, whose weights or whose sums are multiplied by the scales. A k step is four
// k blocks of 64 k; a k block is four wgmma of 16 k.
#pragma once

#include "operands.cuh"

namespace nf4 {

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

}  // namespace nf4
