// Few tokens times an NF4 weight, the weight read once: weight rows stream past activations that stay in registers.
//
// A block owns a range of k ("part") of a run of row groups (16 weight rows each). Consumer warp w of W owns the part's
// 64-wide k blocks w, w + W, w + 2W ...: it keeps their activations in registers as long as the part lasts, as the B
// operands (tokens are the n of mma m16n8k16, weights are A), so that only weights and scales move.
//   produce   one warp brings a row group's bytes and scales into a ring of shared-memory stages (bulk copies)
//   decode    one or two warps turn a stage's scales into floats, laid out as the accumulators need them
//   consume   W warps turn bytes into A registers through a 256-entry table (one byte is two neighbouring k of a row:
//             one A register; 32 copies of the table, one a bank, so no lookup ever conflicts), multiply, and put the
//             scale on the sums of each 64 k
//   reduce    one warp adds the W partial sums of a row group in a fixed order and writes the outputs
// Where k is too long for one part, a block goes through a chunk of row groups part by part ("passes"), and blocks of a
// cluster have parts of their own, whose sums they send to the first of them. Sums are added in a fixed order: results
// do not depend on timing.
//
// k runs in bitsandbytes' order in memory. Within 64 k, lane t of a quad takes weights 16t..16t+15 (8 contiguous
// bytes); the activations are picked to match, so the product sees every k once, in an order of its own.
#pragma once

#include "activations.cuh"
#include "reduction.cuh"

namespace nf4 {

// The A register of one byte: the byte's entry in this lane's copy of the table; anything where it is not wanted.
__device__ __forceinline__ unsigned lookup(unsigned word, int byte, unsigned lane_offset, bool wanted) {
  unsigned pair = __byte_perm(word, lane_offset, 0x7504 | (byte << 4));
  asm("{ .reg .pred p; setp.ne.u32 p, %2, 0;\n@p ld.shared.b32 %0, [%0 + %1]; }"
      : "+r"(pair)
      : "n"(kSharedBase), "r"(static_cast<unsigned>(wanted)));
  return pair;
}

// The A registers of 16 k of a k block: of a row group's upper half, and of its lower one.
__device__ __forceinline__ void look_up(unsigned (&a)[4], uint2 upper, uint2 lower, int step, unsigned lane_offset,
                                        bool above, bool below) {
  unsigned up = step < 2 ? upper.x : upper.y, low = step < 2 ? lower.x : lower.y;
  int byte = step % 2 * 2;
  a[0] = lookup(up, byte, lane_offset, above);
  a[1] = lookup(low, byte, lane_offset, below);
  a[2] = lookup(up, byte + 1, lane_offset, above);
  a[3] = lookup(low, byte + 1, lane_offset, below);
}

template <typename T, int kTiles>
__device__ __forceinline__ void multiply_step(float (&sums)[kTiles][4], const unsigned (&a)[4],
                                              const uint4 (&activations)[kTiles][2], int step) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const uint4& four = activations[tile][step / 2];
    multiply<T>(sums[tile], a, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y, sums[tile]);
  }
}

// kTimed: the warp takes the times of its decoding: codes and scales read, turned into operands, put on the sums.
template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested, bool kTimed>
__device__ __forceinline__ void consume(const RowsArgs& args, char* shared, RowsRun run,
                                        uint4 (&b)[kBlocks][kTiles][2]) {
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Where registers are short a jump past the last block costs more than a block without lookups.
  constexpr bool kJumps = kTiles == 1 || kBlocks < 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4 | (base & 0xff000000u);
  int loaded = run.part;
  const char* my_bytes = shared + Layout::kRing + g * Layout::kWeightPitch + warp * 32 + t * 8;
  const char* my_scales = shared + Layout::scale_slot(0, warp) + g * 8;
  float4* my_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + warp * kTiles * 32 + lane;
  RingPosition ring, sums;
  StageClock<kTimed> decoding;
  decoding.begin(args.clock);
  for (; !run.done(); run.next()) {
    if (run.part != loaded) {
      loaded = run.part;
      load_activations<T, kWarps, kBlocks, kTiles>(args, loaded, b);
    }
    bool below = run.rows() > kHalfRows;
    float acc[kTiles][4] = {};
    const char* bytes = my_bytes + ring.stage * Layout::kStageBytes;
    const char* scales = my_scales + ring.stage * Layout::kDecodedStage;
    // Where k does not fill the warps' last blocks, warps without one leave the shared memory to the others.
    int count = min(args.part_blocks, args.k_blocks - run.part * args.part_blocks) - warp;
    // The decoders have waited for the bytes, or for the first of them.
    barrier_wait(Layout::decoded(base, ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (kJumps && i == kBlocks - 1 && i * kWarps >= count) break;
      bool one = kJumps || i < kBlocks - 1 || i * kWarps < count;
#if __CUDA_ARCH__ >= 900
      if (i > 0 && i == Layout::kFirstBlocks) barrier_wait(Layout::rest_full(base, ring.stage), ring.parity);
#endif
      decoding.resume();
      uint2 upper = *reinterpret_cast<const uint2*>(bytes + i * kWarps * 32);
      uint2 lower = *reinterpret_cast<const uint2*>(bytes + 8 * Layout::kWeightPitch + i * kWarps * 32);
      float part_sum[kTiles][4] = {};
      if constexpr (kTimed) {
        unsigned a[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          look_up(a[step], upper, lower, step, lane_offset, one, one && below);
          pin(a[step]);
        }
        decoding.pause(a[3]);
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_step<T>(part_sum, a[step], b[i], step);
        settle(part_sum[kTiles - 1][3]);
      } else {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          unsigned a[4];
          look_up(a, upper, lower, step, lane_offset, one, one && below);
          multiply_step<T>(part_sum, a, b[i], step);
        }
      }
      decoding.resume();
      static_assert(kWarps % 2 == 0, "two k blocks share a slot row");
      float2 scale = *reinterpret_cast<const float2*>(scales + i * (kWarps / 2) * kTableStride);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!one) part_sum[tile][0] = part_sum[tile][1] = part_sum[tile][2] = part_sum[tile][3] = 0.0f;
        acc[tile][0] += scale.x * part_sum[tile][0];
        acc[tile][1] += scale.x * part_sum[tile][1];
        acc[tile][2] += scale.y * part_sum[tile][2];
        acc[tile][3] += scale.y * part_sum[tile][3];
      }
      decoding.pause(acc[kTiles - 1][3]);
    }
    barrier_arrive(Layout::empty(base, ring.stage));
    ring.advance(args.stages);
    barrier_wait(Layout::sums_empty(base, sums.stage), sums.parity ^ 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      my_sums[sums.stage * kWarps * kTiles * 32 + tile * 32] =
          make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
    }
    barrier_arrive(Layout::sums_full(base, sums.stage));
    sums.advance(2);
  }
  decoding.end(args.clock);
}

__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The barriers that the first copies need; two warps share the work, as it is on the way to the first byte.
template <typename Layout>
__device__ __forceinline__ void init_copy_barriers(unsigned base) {
  if (elected()) {
#pragma unroll
    for (int i = 0; i < Layout::kStageSlots; ++i) barrier_init(Layout::full(base, i), kCopyArrivals);
    barrier_init(Layout::activations(base), 1);
    publish_barriers();
  }
  __syncwarp();
}

template <typename Layout>
__device__ __forceinline__ void init_other_barriers(unsigned base, int warps) {
  if (elected()) {
#pragma unroll
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(Layout::decoded(base, i), Layout::kDecoders * 32);
      barrier_init(Layout::empty(base, i), warps * 32);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(Layout::sums_full(base, i), warps * 32);
      barrier_init(Layout::sums_empty(base, i), 32);
      barrier_init(Layout::parts_full(base, i), 1);
      barrier_init(Layout::parts_free(base, i), 1);
    }
    publish_barriers();
  }
  __syncwarp();
}

// All 32 copies of the 16 entries whose first code is `first`, by one warp.
template <typename T>
__device__ __forceinline__ void build_table(char* shared, int first) {
  // Immediates: the constant bank would be a cold read on the way to the first product.
  constexpr float codes[16] = {NF4_CODEBOOK};
  float high = codes[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
  high *= kStretch;
  char* target = shared + first * 16 * kTableStride + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) *reinterpret_cast<unsigned*>(target + i * kTableStride) = pack2<T>(high, codes[i] * kStretch);
}

// kTimed: one warp takes the times of its decoding. A kernel of its own: a second loop beside the first, though no warp
// enters it, makes the first one up to 50 % slower (registers).
// kNormalises: x's rows are normalised (one pass only); code for it beside the other costs up to 7 % in the same way.
template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested, bool kTimed, bool kNormalises>
__global__ void __launch_bounds__((kWarps + kServiceWarps<kWarps, kTiles>) * 32, 1)
    linear_rows(const __grid_constant__ RowsArgs args) {
#if __CUDA_ARCH__ >= 800
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  // Where no plan fits either, nothing is compiled.
  if ((base & 0xffffff) != kSharedBase || Layout::total(2, 1, 0) > kSharedBytes) __trap();
  int warp = threadIdx.x / 32;
  // Launched ahead of the kernel before, this one begins when that one has ended. Ahead of all that has to be fetched.
  // A cluster's other blocks must not wait with it.
  auto begin = [&] {
    if (blockIdx.x > 0 || threadIdx.x != (kWarps + 1) * 32) return;
    grid_dependency_wait();
    clock_start(args.clock);
  };
  if (args.cluster == 1) begin();
  constexpr int kThreads = (kWarps + kServiceWarps<kWarps, kTiles>) * 32, kFirstDecoder = kWarps + Layout::kDecoders;
  RowsRun run(args);
  launch_dependents();
  if (warp == kWarps) init_copy_barriers<Layout>(base);
  if (warp == kWarps + 1) init_other_barriers<Layout>(base, kWarps);
  if (args.cluster > 1) {
    cluster_arrive();
    begin();
  }
  if (warp == kWarps) {
    barrier_signal(3, kThreads);
    if (!args.constant_weights) grid_dependency_wait();
    if constexpr (Layout::kDecoders == 1) {
      reduce<T, kWarps, kTiles, Layout, kNested, true, kNormalises>(args, shared, run);
    } else {
      produce<Layout, kNested>(args, base, run);
    }
  } else if (warp < kWarps) {
    auto build = [&] {
      for (int first = warp; first < 16; first += kWarps) build_table<T>(shared, first);
    };
    // Many activations compete with the weights for their way in, so they go first; a few can wait behind the table,
    // which needs nothing of the kernel before.
    bool table_first = !kNormalises && args.constant_weights && args.m <= 2;
    if (table_first) build();
    if (kNormalises && args.constant_weights) ask_for_norm<T, kWarps, kBlocks>(args, run.part);
    uint4 b[kBlocks][kTiles][2];
    grid_dependency_wait();
    if constexpr (kNormalises) {
      load_normalised<T, kWarps, kBlocks, kTiles, Layout>(args, shared, run.part, b, build);
    } else {
      load_activations<T, kWarps, kBlocks, kTiles>(args, run.part, b);
      if (!table_first) build();
    }
    barrier_sync(3, kThreads);
    if (threadIdx.x == 0) barrier_arrive(Layout::activations(base));
    if (kTimed && blockIdx.x == 0 && warp == 0) {
      consume<T, kWarps, kBlocks, kTiles, kNested, true>(args, shared, run, b);
    } else {
      consume<T, kWarps, kBlocks, kTiles, kNested, false>(args, shared, run, b);
    }
  } else {
    if (warp == kWarps + 1) barrier_signal(kOthersReady, 64);
    if (warp < kFirstDecoder) {
      barrier_sync(3, kThreads);
      if constexpr (Layout::kDecoders == 2) reduce<T, kWarps, kTiles, Layout, kNested, false, kNormalises>(args, shared, run);
      return;
    }
    if (!args.constant_weights) grid_dependency_wait();
    constexpr int kReads = 2 / Layout::kDecoders;
    int thread = threadIdx.x - kFirstDecoder * 32;
    float4 codes[kReads];
#pragma unroll
    for (int i = 0; kNested && i < kReads; ++i) {
      codes[i] = __ldcg(reinterpret_cast<const float4*>(args.weight.absmax_code) + thread + i * 32);
    }
    barrier_sync(3, kThreads);
#pragma unroll
    for (int i = 0; kNested && i < kReads; ++i) {
      reinterpret_cast<float4*>(shared + Layout::kCode)[thread + i * 32] = codes[i];
    }
    barrier_sync(2, Layout::kDecoders * 32);
    decode<Layout, kNested>(args, shared, run, warp - kFirstDecoder);
  }
#endif
}

}  // namespace nf4
