// The shared memory of linear_wgmma.cuh: a table, two rings of stages and their barriers.
#pragma once

#include "instructions.cuh"
#include "traits.cuh"

namespace nf4 {

// Where dynamic shared memory, and in it the table, starts. As a constant it goes into the immediate offsets of the
// lookups; the kernel checks it.
constexpr int kTableBase = 1024;

// The hardware barriers of a thread block: 0 is __syncthreads, 1 to 3 are the consumer warpgroups' own.
constexpr int kGroupBarrier = 1;
constexpr int kTableBarrier = 7;
constexpr int kScaleBarrier = 8;
constexpr int kPingPongBarrier = 9;  // and 10: one for each warpgroup

template <typename Traits>
struct WgmmaLayout {
  static constexpr int kTokens = Traits::kTokens, kRows = Traits::kRows;
  static constexpr int kStages = Traits::kStages, kTokenStages = Traits::kTokenStages;
  static constexpr int kTableStride = 256;  // a byte permute makes an entry's offset; the second 128 bytes are free
  static constexpr int kTokenBlocks = kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;  // 64-wide k blocks of a token stage
  static constexpr int kWeightBytes = kRows * 128;
  static constexpr int kTokenBytes = kTokenBlocks * kTokens * 128;
  static constexpr int kScaleBytes = 4 * kRows * 4;
  static constexpr int kWeights = 256 * kTableStride;
  static constexpr int kActivations = kWeights + kStages * kWeightBytes;
  static constexpr int kScales = kActivations + kTokenStages * kTokenBytes;
  static constexpr int kCode = kScales + kStages * kScaleBytes;
  static constexpr int kBarriers = kCode + 1024;
  static constexpr int kTotal = kBarriers + (3 * kStages + 3 * kTokenStages) * 8;
  static_assert(kTotal <= 227 * 1024, "more shared memory than an SM has");

  unsigned base;
  __device__ unsigned weights(int stage) const { return base + kWeights + stage * kWeightBytes; }
  __device__ unsigned tokens(int stage) const { return base + kActivations + stage * kTokenBytes; }
  __device__ unsigned weights_full(int stage) const { return base + kBarriers + stage * 8; }
  __device__ unsigned scales_full(int stage) const { return base + kBarriers + (kStages + stage) * 8; }
  __device__ unsigned weights_empty(int stage) const { return base + kBarriers + (2 * kStages + stage) * 8; }
  __device__ unsigned tokens_full(int stage) const { return base + kBarriers + (3 * kStages + stage) * 8; }
  __device__ unsigned tokens_empty(int stage) const {
    return base + kBarriers + (3 * kStages + kTokenStages + stage) * 8;
  }
  // For a token stage that has held partial sums: all threads read those, while tokens are read by wgmma alone.
  __device__ unsigned sums_empty(int stage) const {
    return base + kBarriers + (3 * kStages + 2 * kTokenStages + stage) * 8;
  }

  // One thread sets all barriers up, before any other thread of the block meets one.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(weights_full(i), 1);
      barrier_init(scales_full(i), 64);
      barrier_init(weights_empty(i), Traits::kConsumers);
    }
    for (int i = 0; i < kTokenStages; ++i) {
      barrier_init(tokens_full(i), 1);
      barrier_init(tokens_empty(i), Traits::kConsumerWarps);
      barrier_init(sums_empty(i), Traits::kConsumers);
    }
    publish_barriers();
  }
};

// A place in a ring of stages, and the parity of the barriers' phase there.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace nf4
