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
// Work is a line of (row tile, token tile, 256 k) units cut evenly over the blocks; a tile that is cut goes through the
// workspace, and the block that has its first unit adds the parts in order, so results do not depend on timing.
//
// k order: of each 64 k, lane t of a quad takes 16t..16t+15, eight contiguous bytes; byte i is A column 8i + 2t of the
// product, so column chunk i (8 columns, 16 bytes) of a token holds its 4-byte words i, 8 + i, 16 + i, 24 + i.
// Row order: rows 2g and 2g + 1 of 16 are A rows g and g + 8; a lane then writes two neighbours of the output at once,
// and its 8-byte reads of the swizzled stage do not conflict.
#pragma once

#include "wgmma_service.cuh"

namespace nf4 {

// All 32 copies of the table, 16 entries a turn: pairs of T, or pairs of floats.
template <typename T, bool kFloats>
__device__ __forceinline__ void fill_table(char* shared, int warp, int warps, int stride) {
  constexpr float codes[16] = {NF4_CODEBOOK};
  for (int first = warp; first < 16; first += warps) {
    float high = codes[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
    char* target = shared + first * 16 * stride + threadIdx.x % 32 * (kFloats ? 8 : 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (kFloats) {
        *reinterpret_cast<float2*>(target + i * stride) = make_float2(high, codes[i]);
      } else {
        *reinterpret_cast<unsigned*>(target + i * stride) = pack2<T>(high, codes[i]);
      }
    }
  }
}

// The A register of one byte: its entry in this lane's copy of the table.
__device__ __forceinline__ unsigned table_entry(unsigned word, int byte, unsigned lane_offset) {
  unsigned pair;
  asm("ld.shared.b32 %0, [%1 + %2];"
      : "=r"(pair)
      : "r"(__byte_perm(word, lane_offset, 0x5504 | byte << 4)), "n"(kTableBase));
  return pair;
}

// The same scaled, from the table of float pairs: rounded once, as bitsandbytes rounds its dequantized weights.
template <typename T>
__device__ __forceinline__ unsigned scaled_entry(unsigned word, int byte, unsigned lane_offset, float scale) {
  float low, high;
  asm("ld.shared.v2.f32 {%0, %1}, [%2 + %3];"
      : "=f"(low), "=f"(high)
      : "r"(__byte_perm(word, lane_offset, 0x5504 | byte << 4)), "n"(kTableBase));
  return pack2<T>(low * scale, high * scale);
}

// Adds kPart of the sums of one 64 k, times their rows' scales.
template <int kCount, int kPart>
__device__ __forceinline__ void add_scaled(float (&total)[kCount], const float (&sums)[kCount], float2 scale,
                                           int first) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    total[first + i] += ((first + i) % 4 < 2 ? scale.x : scale.y) * sums[first + i];
  }
}

// Adds bias, rounds once and writes a warpgroup's 64 rows x kTokens tokens.
template <typename T, int kTokens>
__device__ __forceinline__ void write_tile(const WgmmaArgs& args, int row, int token, const float (&sum)[kTokens / 2]) {
  T* out = static_cast<T*>(args.out);
  const T* bias = static_cast<const T*>(args.bias);
  if (row >= args.n) return;
  bool both = row + 1 < args.n, paired = both && args.n % 2 == 0;
  float add0 = bias ? to_float(bias[row]) : 0.0f, add1 = bias && both ? to_float(bias[row + 1]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kTokens / 2; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int at_token = token + i * 2 + j;
      if (at_token >= args.m) continue;
      T* at = out + int64_t{at_token} * args.n + row;
      if (paired) {
        *reinterpret_cast<unsigned*>(at) = pack2<T>(sum[i + j] + add0, sum[i + j + 2] + add1);
      } else {
        at[0] = from_float<T>(sum[i + j] + add0);
        if (both) at[1] = from_float<T>(sum[i + j + 2] + add1);
      }
    }
  }
}

// A tile that is cut belongs to the block that has its first unit; the others hand their parts over and go on. That
// block comes to the tile last of its run, the others first of theirs (or only), so it hardly ever waits; and it waits
// only for blocks that were started before it (runs are dealt out from the line's end), so it never waits forever.
// True in the owner, with the whole sum.
template <int kCount, int kGroups>
__device__ __forceinline__ bool combine_parts(const WgmmaArgs& args, int tile, bool owner, int group,
                                              float (&sum)[kCount]) {
  int thread = threadIdx.x % 128, run = WgmmaRun::index();
  auto slot = [&](int of_run) {
    return args.partial + (int64_t{of_run} * kGroups + group) * (kCount / 4) * 128 + thread;
  };
  int* counter = args.counters + tile * kGroups + group;
  if (!owner) {
    float4* mine = slot(run);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      __stcg(mine + i / 4 * 128, make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
    }
    barrier_sync(1 + group, 128);
    if (thread == 0) {
      __threadfence();
      atomicAdd(counter, 1);
    }
    return false;
  }
  int end = (tile + 1) * args.steps, last = run;
  while (WgmmaRun::start(args, last + 1) < end) ++last;
  if (thread == 0) {
    while (*const_cast<volatile int*>(counter) != last - run) __nanosleep(20);
    *counter = 0;
    __threadfence();
  }
  barrier_sync(1 + group, 128);
#pragma unroll (kCount <= 16 ? 8 : kCount <= 32 ? 4 : 2)
  for (int other = run + 1; other <= last; ++other) {
    const float4* from = slot(other);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 part = __ldcg(from + i / 4 * 128);
      sum[i] += part.x;
      sum[i + 1] += part.y;
      sum[i + 2] += part.z;
      sum[i + 3] += part.w;
    }
  }
  return true;
}

template <typename T, int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, char* shared) {
  using Layout = WgmmaLayout<kTokens, kGroups, kStages, kTokenStages>;
  constexpr int kCount = kTokens / 2;
  Layout layout{shared_address(shared)};
  int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned lane_offset = lane * (kSums == 0 ? 8 : 4);
  int row_in_block = warp * 16 + g * 2;
  // The stage's chunk of k block i is (2i + t / 2) ^ (row % 8), and row % 8 is 2 (g % 4) or one more.
  const char* my_rows = shared + Layout::kWeights + row_in_block * 128 + t % 2 * 8;
  int chunk = (t / 2) ^ (row_in_block % 8);
  const char* my_scales = shared + Layout::kScales + row_in_block * 4;
  Ring<kStages> ring;
  Ring<kTokenStages> tokens;
  WgmmaRun run(args);
  int released = 0;
  uint2 upper[4], lower[4];
  float2 scale[4];
  unsigned a[2][4][4];
  auto take_stage = [&] {
    barrier_wait(layout.weights_full(ring.stage), ring.parity);
    const char* rows = my_rows + ring.stage * Layout::kWeightBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = *reinterpret_cast<const uint2*>(rows + ((chunk ^ 2 * i) << 4));
      lower[i] = *reinterpret_cast<const uint2*>(rows + 128 + ((chunk ^ 1 ^ 2 * i) << 4));
    }
    barrier_wait(layout.scales_full(ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = *reinterpret_cast<const float2*>(my_scales + ring.stage * Layout::kScaleBytes + i * Layout::kRows * 4);
    }
    barrier_arrive(layout.weights_empty(ring.stage));
    ring.advance();
  };
  // A registers of 16 k of k block i.
  auto decode = [&](int i, int s) {
    unsigned up = s < 2 ? upper[i].x : upper[i].y, low = s < 2 ? lower[i].x : lower[i].y;
    int byte = s % 2 * 2;
    if constexpr (kSums == 0) {
      a[i % 2][s][0] = scaled_entry<T>(up, byte, lane_offset, scale[i].x);
      a[i % 2][s][1] = scaled_entry<T>(low, byte, lane_offset, scale[i].y);
      a[i % 2][s][2] = scaled_entry<T>(up, byte + 1, lane_offset, scale[i].x);
      a[i % 2][s][3] = scaled_entry<T>(low, byte + 1, lane_offset, scale[i].y);
    } else {
      a[i % 2][s][0] = table_entry(up, byte, lane_offset);
      a[i % 2][s][1] = table_entry(low, byte, lane_offset);
      a[i % 2][s][2] = table_entry(up, byte + 1, lane_offset);
      a[i % 2][s][3] = table_entry(low, byte + 1, lane_offset);
    }
  };
  constexpr int kBlocks = Layout::kTokenBlocks;
  auto release = [&](int i) {
    if (i % kBlocks == kBlocks - 1) {
      if (lane == 0) barrier_arrive(layout.tokens_empty(released));
      released = released + 1 == kTokenStages ? 0 : released + 1;
    }
  };
  // Groups take turns at the tensor cores: side by side they would end, and then decode, all at the same time.
  constexpr int kTurn = 9;
  if (kTurns && group == kGroups - 1) barrier_signal(kTurn, 256);
  while (run.take(args)) {
    float total[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = 0.0f;
    take_stage();
#pragma unroll
    for (int s = 0; s < 4; ++s) decode(0, s);
    for (int step = 0; step < run.steps; ++step) {
      float sums[kSums ? kSums : 1][kCount];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i % kBlocks == 0) barrier_wait(layout.tokens_full(tokens.stage), tokens.parity);
        uint64_t tile = swizzled_tile(layout.tokens(tokens.stage) + i % kBlocks * kTokens * 128);
        if (kTurns) barrier_sync(kTurn + group, 256);
        const int kNow = kSums == 2 ? i % 2 : 0;
        // Between products, what the next ones need: a product holds its warp until the one before has begun.
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          wgmma_fence();
          if constexpr (kSums == 0) {
            wgmma<T, kTokens>(total, a[i % 2][s], tile + s * 2, true);
            wgmma_commit();
            if (s == 0) {
              wgmma_wait<1>();
              if (i > 0) release(i - 1);
              else if (step > 0) release(3);
            }
            if (i < 3) decode(i + 1, s);
            continue;
          }
          wgmma<T, kTokens>(sums[kNow], a[i % 2][s], tile + s * 2, s > 0);
          wgmma_commit();
          if constexpr (kSums == 2) if (i > 0) {
            if (s == 0) {
              wgmma_wait<1>();
              pin(sums[(i + 1) % 2]);
              release(i - 1);
            }
            add_scaled<kCount, kCount / 4>(total, sums[(i + 1) % 2], scale[(i + 3) % 4], s * (kCount / 4));
          }
          if (i < 3) decode(i + 1, s);
        }
        if (kTurns) {
          wgmma_wait<2>();
          barrier_signal(kTurn + (group + 1) % kGroups, 256);
        }
        if (i % kBlocks == kBlocks - 1) tokens.advance();
        float2 by = scale[i];
        if (i == 3 && step + 1 < run.steps) {
          take_stage();
#pragma unroll
          for (int s = 0; s < 4; ++s) decode(0, s);
        }
        if (kSums == 1 || (kSums == 2 && i == 3)) {
          wgmma_wait<0>();
          pin(sums[kNow]);
          release(i);
          add_scaled<kCount, kCount>(total, sums[kNow], by, 0);
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
    bool whole = run.steps == args.steps;
    if (whole || combine_parts<kCount, kGroups>(args, run.tile, run.first_step == 0, group, total)) {
      write_tile<T, kTokens>(args, row, token, total);
    }
  }
}

template <typename T, int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns, bool kNested>
__global__ void __launch_bounds__((kGroups + 1) * 128, 1)
    linear_wgmma(const __grid_constant__ WgmmaArgs args, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = WgmmaLayout<kTokens, kGroups, kStages, kTokenStages>;
  extern __shared__ __align__(1024) char shared[];
  Layout layout{shared_address(shared)};
  if (layout.base != kTableBase) __trap();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(layout.weights_full(i), 1);
      barrier_init(layout.scales_full(i), 64);
      barrier_init(layout.weights_empty(i), kGroups * 128);
    }
    for (int i = 0; i < kTokenStages; ++i) {
      barrier_init(layout.tokens_full(i), 1);
      barrier_init(layout.tokens_empty(i), kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  fill_table<T, kSums == 0>(shared, warp, (kGroups + 1) * 4, Layout::kTableStride);
  __syncthreads();
  if (warp >= kGroups * 4) {
    give_registers<kTokens == 256 ? 40 : 64>();
    int service = warp - kGroups * 4;
    if (service == 0) {
      if (lane == 0) bring_weights<Layout, kStages>(args, &map, layout);
    } else if (service == 1) {
      if (lane == 0) bring_tokens<Layout, kTokenStages>(args, layout);
    } else {
      bring_scales<Layout, kStages, kNested>(args, layout, shared, (service - 2) * 32 + lane);
    }
  } else {
    take_registers<kTokens == 256 ? 232 : kGroups == 2 ? 216 : kGroups == 3 ? 144 : 104>();
    multiply_tiles<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns>(args, shared);
  }
#endif
}

}  // namespace nf4
