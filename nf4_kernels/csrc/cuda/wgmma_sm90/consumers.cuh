// The consumer warpgroups of linear_wgmma.cuh: they multiply their k steps of a tile (tile_sums.cuh), and then reduce the
// sums or leave them to another block.
#pragma once

#include "../clock.cuh"
#include "epilogue.cuh"
#include "split_tiles.cuh"
#include "tile_sums.cuh"

namespace nf4 {

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

// kTimed: threads time their decoding: codes and scales loaded, turned into operands, scales put on the sums.
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
