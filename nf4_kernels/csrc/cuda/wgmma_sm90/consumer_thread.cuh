// A consumer thread's place in its tile, and the rings of stages that it reads.
#pragma once

#include "layout.cuh"

namespace nf4 {

// A thread's part of a tile, and where that part lies in shared memory. Lane (g, t) has rows 2g and 2g + 1 of its warp's 16.
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

}  // namespace nf4
