// Tens to hundreds of tokens times an NF4 weight on Hopper: the weight is read once and decoded straight into the
// registers that wgmma multiplies; tokens are the product's n.
//
// Two launches. `arrange_tokens` copies the activations into tiles of shared memory's layout (64 k x kTokens, swizzled,
// k in the order below); the second starts while the first still runs and waits for it only where it reads the tiles.
// In the second every SM holds one block of kGroups consumer warpgroups (64 weight rows each) and four service warps:
//   bring weights   256 k a stage (one tensor copy of kGroups * 64 rows x 128 bytes)
//   bring tokens    bulk copies of arranged tiles
//   bring scales    two warps, as floats, nested ones decoded
//   multiply        a byte is two neighbouring k of a row, which is one A register: a 256-entry table (32 copies, one a
//                   bank, so that no lookup conflicts) turns bytes into registers while the tensor cores are busy with
//                   the 64 k before; the sums of each 64 k get their scale in float32 as they are added up. A tile of
//                   256 tokens leaves no registers for such sums: there weights are scaled before they are rounded
// Work is a line of (row tile, token tile, 256 k) units cut evenly over the blocks, or every tile is cut into as many
// parts, the first a little longer. A tile that is cut goes through the workspace, and the block that has its first unit
// adds the parts in order, so results do not depend on timing. Parts come to it through the weights' or the tokens' ring.
//
// k order: of each 64 k, lane t of a quad takes 16t..16t+15, eight contiguous bytes; byte i is A column 8i + 2t of the
// product, so column chunk i (8 columns, 16 bytes) of a token holds its 4-byte words i, 8 + i, 16 + i, 24 + i.
// Row order: rows 2g and 2g + 1 of 16 are A rows g and g + 8; a lane then writes two neighbours of the output at once,
// and its 8-byte reads of the swizzled stage do not conflict.
#pragma once

#include <type_traits>

#include "wgmma_service.cuh"
#include "wgmma_sums.cuh"
#include "wgmma_table.cuh"

namespace nf4 {

// Hardware barriers: 1 to 4 are the groups', 8 the scales'.
constexpr int kTableFilled = 7;

// Adds kPart of the sums of one 64 k, times their rows' scales.
template <int kCount, int kPart>
__device__ __forceinline__ void add_scaled(float (&total)[kCount], const float (&sums)[kCount], float2 scale,
                                           int first) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    total[first + i] += ((first + i) % 4 < 2 ? scale.x : scale.y) * sums[first + i];
  }
}

// kTimed: threads take the times of their decoding: codes and scales read, turned into operands, put on the sums.
template <typename T, int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns, bool kGates,
          bool kTimed>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, char* shared) {
  using Layout = WgmmaLayout<kTokens, kGroups, kStages, kTokenStages>;
  constexpr int kCount = kTokens / 2;
  Layout layout{shared_address(shared)};
  int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned lane_offset = lane * (kSums == 0 && !kOfHalves<T> ? 8 : 4);
  int row_in_block = warp * 16 + g * 2;
  // The stage's chunk of k block i is (2i + t / 2) ^ (row % 8), and row % 8 is 2 (g % 4) or one more.
  const char* my_rows = shared + Layout::kWeights + row_in_block * 128 + t % 2 * 8;
  int chunk = (t / 2) ^ (row_in_block % 8);
  const char* my_scales = shared + Layout::kScales + row_in_block * 4;
  unsigned first_tile = swizzled_tile(layout.tokens(0));
  Ring<kStages> ring;
  Ring<kTokenStages> tokens;
  WgmmaRun run(args);
  int released = 0;
  uint2 upper[4], lower[4];
  float2 scale[4];
  unsigned a[2][4][4];
  bool tokens_there = false, weights_there = false, scales_there = false;
  StageClock<kTimed> decoding;
  decoding.begin(args.clock);
  auto take_stage = [&] {
    if (!weights_there) barrier_wait(layout.weights_full(ring.stage), ring.parity);
    decoding.resume();
    const char* rows = my_rows + ring.stage * Layout::kWeightBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = *reinterpret_cast<const uint2*>(rows + ((chunk ^ 2 * i) << 4));
      lower[i] = *reinterpret_cast<const uint2*>(rows + 128 + ((chunk ^ 1 ^ 2 * i) << 4));
    }
    decoding.pause(lower[3].y);
    if (!scales_there) barrier_wait(layout.scales_full(ring.stage), ring.parity);
    decoding.resume();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = *reinterpret_cast<const float2*>(my_scales + ring.stage * Layout::kScaleBytes + i * Layout::kRows * 4);
    }
    decoding.pause(scale[3].y);
    loads_before_copies();
    barrier_arrive(layout.weights_empty(ring.stage));
    ring.advance();
  };
  // A registers of 16 k of k block i.
  auto decode = [&](int i, int s) {
    unsigned up = s < 2 ? upper[i].x : upper[i].y, low = s < 2 ? lower[i].x : lower[i].y;
    int byte = s % 2 * 2;
    decoding.resume();
    a[i % 2][s][0] = table_entry(up, byte, lane_offset);
    a[i % 2][s][1] = table_entry(low, byte, lane_offset);
    a[i % 2][s][2] = table_entry(up, byte + 1, lane_offset);
    a[i % 2][s][3] = table_entry(low, byte + 1, lane_offset);
    decoding.pause(a[i % 2][s]);
  };
  // Where weights are scaled before they are rounded: all lookups of a k block go ahead of its neighbour's products, which
  // hold the warp, and the rounding comes behind them.
  using Pair = std::conditional_t<kOfHalves<T>, __half2, float2>;
  Pair raw[kSums == 0 ? 4 : 1][4];
  auto look_up = [&](int i) {
    decoding.resume();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      unsigned up = s < 2 ? upper[i].x : upper[i].y, low = s < 2 ? lower[i].x : lower[i].y;
      int byte = s % 2 * 2;
      table_pair(raw[s][0], up, byte, lane_offset);
      table_pair(raw[s][1], low, byte, lane_offset);
      table_pair(raw[s][2], up, byte + 1, lane_offset);
      table_pair(raw[s][3], low, byte + 1, lane_offset);
    }
    decoding.pause(as_floats(raw[kSums == 0 ? 3 : 0][3]).y);
  };
  auto round = [&](int i) {
    decoding.resume();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float by = j % 2 ? scale[i].y : scale[i].x;
        if (kOfHalves<T>) by *= 1 / kHalfStretch;
        float2 codes = as_floats(raw[s][j]);
        a[i % 2][s][j] = pack2<T>(codes.x * by, codes.y * by);
      }
    }
    decoding.pause(a[i % 2][3]);
  };
  constexpr int kBlocks = Layout::kTokenBlocks;
  auto release = [&](int i) {
    if (i % kBlocks == kBlocks - 1) {
      warp_arrive(layout.tokens_empty(released));
      released = released + 1 == kTokenStages ? 0 : released + 1;
    }
  };
  // Asks, while k block i is multiplied, for what comes next.
  auto look_ahead = [&](int i) {
    if (i % kBlocks == kBlocks - 1) {
      tokens_there = barrier_passed(layout.tokens_full(tokens.stage), tokens.parity);
    }
    if (i == 3) {
      weights_there = barrier_passed(layout.weights_full(ring.stage), ring.parity);
      scales_there = barrier_passed(layout.scales_full(ring.stage), ring.parity);
    }
  };
  // Groups take turns at the tensor cores: side by side they would end, and then decode, all at the same time.
  constexpr int kTurn = 9;
  if (kTurns && group == kGroups - 1) barrier_signal(kTurn, 256);
  while (run.take(args)) {
    float total[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = 0.0f;
    weights_there = scales_there = false;
    take_stage();
    if constexpr (kSums == 0) {
      look_up(0);
      round(0);
    } else {
#pragma unroll
      for (int s = 0; s < 4; ++s) decode(0, s);
    }
    for (int step = 0; step < run.steps; ++step) {
      bool more = step + 1 < run.steps;
      float sums[kSums ? kSums : 1][kCount];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i % kBlocks == 0 && !tokens_there) barrier_wait(layout.tokens_full(tokens.stage), tokens.parity);
        unsigned tile = first_tile + tokens.stage * (Layout::kTokenBytes >> 4) + i % kBlocks * kTokens * 8;
        if (i % kBlocks == kBlocks - 1) tokens.advance();
        if (kTurns) barrier_sync(kTurn + group, 256);
        const int kNow = kSums == 2 ? i % 2 : 0;
        // Between products, what the next ones need: a product holds its warp until the one before has begun.
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          wgmma_fence();
          if constexpr (kSums == 0) {
            wgmma<T, kTokens>(total, a[i % 2][s], descriptor(tile + s * 2), true);
            wgmma_commit();
            if (s == 0) {
              look_ahead(i);
              wgmma_wait<1>();
              if (i > 0) release(i - 1);
              else if (step > 0) release(3);
              if (i == 3 && more) take_stage();
              if (i < 3 || more) look_up((i + 1) % 4);
            }
            if (s == 3 && (i < 3 || more)) round((i + 1) % 4);
            continue;
          }
          wgmma<T, kTokens>(sums[kNow], a[i % 2][s], descriptor(tile + s * 2), s > 0);
          wgmma_commit();
          if (s == 0) look_ahead(i);
          if constexpr (kSums == 2) if (i > 0) {
            if (s == 0) {
              wgmma_wait<1>();
              pin(sums[(i + 1) % 2]);
              release(i - 1);
            }
            decoding.resume();
            add_scaled<kCount, kCount / 4>(total, sums[(i + 1) % 2], scale[(i + 3) % 4], s * (kCount / 4));
            decoding.pause(total[(s + 1) * (kCount / 4) - 1]);
          }
          if (i < 3) decode(i + 1, s);
        }
        if (kTurns) {
          wgmma_wait<2>();
          barrier_signal(kTurn + (group + 1) % kGroups, 256);
        }
        float2 by = scale[i];
        if (kSums > 0 && i == 3 && more) {
          take_stage();
#pragma unroll
          for (int s = 0; s < 4; ++s) decode(0, s);
        }
        if (kSums == 1 || (kSums == 2 && i == 3)) {
          wgmma_wait<0>();
          pin(sums[kNow]);
          release(i);
          decoding.resume();
          add_scaled<kCount, kCount>(total, sums[kNow], by, 0);
          decoding.pause(total[kCount - 1]);
        }
      }
    }
    if constexpr (kSums == 0) {
      wgmma_wait<0>();
      pin(total);
      release(3);
    }

    int row = run.tile / args.token_tiles * Layout::kRows + row_in_block;
    int token = run.tile % args.token_tiles * kTokens + t * 2;
    if (run.first_step > 0) {
      hand_over<kCount, kGroups>(args, run.tile, group, total);
      continue;
    }
    Residual<kTokens> rest;
    if (!kGates && Residual<kTokens>::kAhead && args.residual && is_paired(args, row)) {
      rest.template load<T>(args, row, token, 0);
    }
    if (run.steps < args.steps) {
      if constexpr (PartRing<Layout, kTokens, kGroups>::kOfTokens) {
        add_parts<kTokens, kGroups, Layout, kTokenStages>(args, run.tile, shared, layout, tokens, total);
      } else {
        add_parts<kTokens, kGroups, Layout, kStages>(args, run.tile, shared, layout, ring, total);
      }
    }
    if constexpr (kGates) {
      write_gated<T, kTokens, kSums == 0>(args, row, token, total);
    } else if (args.residual) {
      write_tile<T, kTokens, kSums == 0, true>(args, row, token, total, rest);
    } else {
      write_tile<T, kTokens, kSums == 0, false>(args, row, token, total, rest);
    }
  }
  if (threadIdx.x % 128 == 0) clock_end(args.clock);
  decoding.end(args.clock);
}

// kTimed: one warpgroup takes the times of its decoding. A kernel of its own: a second loop beside the first, though no
// warp enters it, makes the first one up to 15 % slower.
template <typename T, int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns, bool kNested,
          bool kGates, bool kTimed>
__global__ void __launch_bounds__((kGroups + 1) * 128, 1)
    linear_wgmma(const __grid_constant__ WgmmaArgs args, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = WgmmaLayout<kTokens, kGroups, kStages, kTokenStages>;
  extern __shared__ __align__(1024) char shared[];
  Layout layout{shared_address(shared)};
  if (layout.base != kTableBase) __trap();
  let_next_start();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kGroups * 4 && lane == 0) prefetch_map(&map);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(layout.weights_full(i), 1);
      barrier_init(layout.scales_full(i), 64);
      barrier_init(layout.weights_empty(i), kGroups * 128);
    }
    for (int i = 0; i < kTokenStages; ++i) {
      barrier_init(layout.tokens_full(i), 1);
      barrier_init(layout.tokens_empty(i), kGroups * 4);
      barrier_init(layout.sums_empty(i), kGroups * 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (warp >= kGroups * 4) {
    give_registers<kTokens == 256 ? 40 : kGroups == 2 ? 72 : kGroups == 3 ? 80 : 64>();
    int service = warp - kGroups * 4;
    if (service == 0) {
      if (lane == 0) bring_weights<kTokens, kGroups, Layout, kStages, kGates>(args, &map, layout);
    } else if (service == 1) {
      if (lane == 0) bring_tokens<kTokens, kGroups, Layout, kTokenStages>(args, layout);
    } else {
      bring_scales<Layout, kStages, kNested, kGates>(args, layout, shared, (service - 2) * 32 + lane);
    }
  } else {
    take_registers<kTokens == 256 ? 232 : kGroups == 2 ? 216 : kGroups == 3 ? 144 : 104>();
    // Meanwhile the first stages are on their way.
    fill_table<T, kSums == 0>(shared, warp, kGroups * 4, Layout::kTableStride);
    barrier_sync(kTableFilled, kGroups * 128);
    if (kTimed && blockIdx.x + blockIdx.y == 0 && warp < 4) {
      multiply_tiles<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns, kGates, true>(args, shared);
    } else {
      multiply_tiles<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns, kGates, false>(args, shared);
    }
  }
#endif
}

}  // namespace nf4
