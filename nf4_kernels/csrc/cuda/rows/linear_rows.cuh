// GEMM of up to 8 tokens with an NF4 weight that is read once: weight rows stream past activations that stay in registers.
//
// A thread block has a part of k for a run of row groups (16 weight rows each). Consumer warp w of W has the part's 64-wide
// k blocks w, w + W, w + 2W ...: it keeps their activations in registers as long as the part lasts, as B operands (tokens
// are the n of mma m16n8k16, weights are A), so that only weights and scales move. The block is warp-specialized:
//   produce         one warp loads a row group's codes and scales into a ring of shared-memory stages (bulk copies)
//   decode_scales   two warps turn a stage's scales into floats, laid out as the accumulators need them
//   consume         W warps turn bytes into A registers through a table of 256 entries (a byte is two neighbouring k of a
//                   row, which is one A register; there are 32 copies of the table, one for each bank, so that no lookup
//                   conflicts), multiply, and apply the scale to the sums of each 64 k
//   reduce          one warp adds the W sums of a row group in a fixed order and writes the outputs
// Where k is too long for one part, it is split: a block goes through a chunk of row groups part by part ("passes"), and
// the blocks of a cluster have parts of their own (split-K), whose partial sums they send to the first of them. Sums are
// added in a fixed order, so results do not depend on timing.
//
// k runs in bitsandbytes' order in memory. Within 64 k, lane t of a quad takes weights 16t..16t+15 (8 contiguous bytes); the
// activations are picked to match, so that mma sees every k once, in an order of its own.
#pragma once

#include "activations.cuh"
#include "reduction.cuh"

namespace nf4 {

// The A register of one byte: the byte's entry in this lane's copy of the table. Where it is not wanted it is anything.
__device__ __forceinline__ unsigned table_entry(unsigned word, int byte, unsigned lane_offset, bool wanted) {
  unsigned pair = __byte_perm(word, lane_offset, 0x7504 | (byte << 4));
  asm("{ .reg .pred p; setp.ne.u32 p, %2, 0;\n@p ld.shared.b32 %0, [%0 + %1]; }"
      : "+r"(pair)
      : "n"(kSharedBase), "r"(static_cast<unsigned>(wanted)));
  return pair;
}

// The A registers of 16 k of a k block: a row group's upper half, and its lower half where `below`.
__device__ __forceinline__ void decode_codes(unsigned (&a)[4], uint2 upper, uint2 lower, int step, unsigned lane_offset,
                                             bool below) {
  unsigned up = step < 2 ? upper.x : upper.y, low = step < 2 ? lower.x : lower.y;
  int byte = step % 2 * 2;
  a[0] = table_entry(up, byte, lane_offset, true);
  a[1] = table_entry(low, byte, lane_offset, below);
  a[2] = table_entry(up, byte + 1, lane_offset, true);
  a[3] = table_entry(low, byte + 1, lane_offset, below);
}

template <typename T>
__device__ __forceinline__ void mma_step(float (&sums)[4], const unsigned (&a)[4], const uint4 (&activations)[2], int step) {
  const uint4& four = activations[step / 2];
  mma<T>(sums, a, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y, sums);
}
// The same for several token tiles, which experts' kernels have.
template <typename T, int kTiles>
__device__ __forceinline__ void mma_step(float (&sums)[kTiles][4], const unsigned (&a)[4],
                                         const uint4 (&activations)[kTiles][2], int step) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) mma_step<T>(sums[tile], a, activations[tile], step);
}

// kTimed: the warp times its decoding: codes and scales loaded, turned into operands, scales put on the sums.
template <typename T, int kWarps, int kBlocks, bool kNested, bool kTimed>
__device__ __forceinline__ void consume(const RowsArgs& args, char* shared, RowsRun run, uint4 (&b)[kBlocks][2]) {
  using Layout = RowsLayout<kWarps, kBlocks, kNested>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4 | (base & 0xff000000u);
  int loaded = run.part;
  const char* my_bytes = shared + Layout::kRing + g * Layout::kWeightPitch + warp * 32 + t * 8;
  const char* my_scales = shared + Layout::scale_slot(0, warp) + g * 8;
  float4* my_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + warp * 32 + lane;
  RingPosition ring;
  unsigned groups = 0;  // row groups so far; there is room for the sums of two
  StageClock<kTimed> decoding;
  decoding.begin(args.clock);
  for (; !run.done(); run.next()) {
    if (run.part != loaded) {
      loaded = run.part;
      load_activations<T, kWarps>(args, loaded, b);
    }
    bool below = run.rows() > kHalfRows;
    float acc[4] = {};
    const char* bytes = my_bytes + ring.stage * Layout::kStageBytes;
    const char* scales = my_scales + ring.stage * Layout::kDecodedStage;
    // Where k does not fill the warps' last k blocks, warps without one leave shared memory to the others.
    int count = min(args.part_blocks, args.k_blocks - run.part * args.part_blocks) - warp;
    // The decoders have waited for the bytes, or for the first of them.
    barrier_wait(Layout::decoded(base, ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i == kBlocks - 1 && i * kWarps >= count) break;
      if (i > 0 && i == Layout::kFirstBlocks) barrier_wait(Layout::rest_full(base, ring.stage), ring.parity);
      decoding.resume();
      uint2 upper = *reinterpret_cast<const uint2*>(bytes + i * kWarps * 32);
      uint2 lower = *reinterpret_cast<const uint2*>(bytes + 8 * Layout::kWeightPitch + i * kWarps * 32);
      float part_sum[4] = {};
      if constexpr (kTimed) {
        unsigned a[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          decode_codes(a[step], upper, lower, step, lane_offset, below);
          pin(a[step]);
        }
        decoding.pause(a[3]);
#pragma unroll
        for (int step = 0; step < 4; ++step) mma_step<T>(part_sum, a[step], b[i], step);
        settle(part_sum[3]);
      } else {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          unsigned a[4];
          decode_codes(a, upper, lower, step, lane_offset, below);
          mma_step<T>(part_sum, a, b[i], step);
        }
      }
      decoding.resume();
      static_assert(kWarps % 2 == 0, "two k blocks share a slot row");
      float2 scale = *reinterpret_cast<const float2*>(scales + i * (kWarps / 2) * kTableStride);
      acc[0] += scale.x * part_sum[0];
      acc[1] += scale.x * part_sum[1];
      acc[2] += scale.y * part_sum[2];
      acc[3] += scale.y * part_sum[3];
      decoding.pause(acc[3]);
    }
    barrier_arrive(Layout::empty(base, ring.stage));
    ring.advance(args.stages);
    unsigned stage = groups % 2;
    barrier_wait(Layout::sums_empty(base, stage), groups / 2 % 2 ^ 1);
    my_sums[stage * kWarps * 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    barrier_arrive(Layout::sums_full(base, stage));
    ++groups;
  }
  decoding.end(args.clock);
}

__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Sets up the barriers that the first loads need. Two warps share the setting up, since the first byte waits for it.
template <typename Layout>
__device__ __forceinline__ void init_copy_barriers(unsigned base) {
  if (elect_one()) {
#pragma unroll
    for (int i = 0; i < Layout::kStageSlots; ++i) barrier_init(Layout::full(base, i), kCopyArrivals);
    barrier_init(Layout::activations(base), 1);
    publish_barriers();
  }
  __syncwarp();
}

template <typename Layout>
__device__ __forceinline__ void init_other_barriers(unsigned base, int warps) {
  if (elect_one()) {
#pragma unroll
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(Layout::decoded(base, i), Layout::kDecoders * 32);
      barrier_init(Layout::empty(base, i), warps * 32);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(Layout::sums_full(base, i), warps * 32);
      barrier_init(Layout::sums_empty(base, i), 32);
      barrier_init(Layout::partials_full(base, i), 1);
      barrier_init(Layout::partials_free(base, i), 1);
    }
    publish_barriers();
  }
  __syncwarp();
}

// Fills all 32 copies of the 16 entries whose first code is `first`, by one warp.
template <typename T>
__device__ __forceinline__ void build_table(char* shared, int first) {
  // These are immediates, since a cold read of the constant bank would delay the first mma.
  constexpr float codes[16] = {NF4_CODEBOOK};
  float high = codes[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
  high *= kStretch;
  char* target = shared + first * 16 * kTableStride + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) *reinterpret_cast<unsigned*>(target + i * kTableStride) = pack2<T>(high, codes[i] * kStretch);
}

template <typename T, int kWarps, int kBlocks, bool kNested, bool kTimed, bool kNormalises, bool kGates>
__device__ __forceinline__ void run_linear_rows(const RowsArgs& args) {
  using Layout = RowsLayout<kWarps, kBlocks, kNested>;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if ((base & 0xffffff) != kSharedBase) __trap();
  int warp = threadIdx.x / 32;
  // A launch that started early begins, for the clock, when the kernel in front has ended. This comes ahead of all that has
  // to be loaded. A cluster's other blocks must not wait with it.
  auto begin = [&] {
    if (blockIdx.x > 0 || threadIdx.x != (kWarps + 1) * 32) return;
    grid_dependency_wait();
    clock_start(args.clock);
  };
  if (args.cluster == 1) begin();
  constexpr int kThreads = Layout::kThreads, kFirstDecoder = kWarps + 2;
  RowsRun run(args, kRunRows<kGates>);
  launch_dependents();
  if (warp == kWarps) init_copy_barriers<Layout>(base);
  if (warp == kWarps + 1) init_other_barriers<Layout>(base, kWarps);
  if (args.cluster > 1) {
    cluster_arrive();
    begin();
  }
  if (warp == kWarps) {
    barrier_signal(kTableBarrier, kThreads);
    if (!args.constant_weights) grid_dependency_wait();
    produce<Layout, kNested, kGates>(args, base, run);
  } else if (warp < kWarps) {
    auto build = [&] {
      for (int first = warp; first < 16; first += kWarps) build_table<T>(shared, first);
    };
    // Many activations compete with the weights for memory, so they go first; few can wait behind the table, which needs
    // nothing of the kernel in front.
    bool table_first = !kNormalises && args.constant_weights && args.m <= 2;
    if (table_first) build();
    if (kNormalises && args.constant_weights) prefetch_norm_weight<T, kWarps, kBlocks>(args, run.part);
    uint4 b[kBlocks][2];
    grid_dependency_wait();
    if constexpr (kNormalises) {
      load_normalised<T, kWarps, kBlocks, Layout>(args, shared, run.part, b, build);
    } else {
      load_activations<T, kWarps>(args, run.part, b);
      if (!table_first) build();
    }
    barrier_sync(kTableBarrier, kThreads);
    if (threadIdx.x == 0) barrier_arrive(Layout::activations(base));
    if (kTimed && blockIdx.x == 0 && warp == 0) {
      consume<T, kWarps, kBlocks, kNested, true>(args, shared, run, b);
    } else {
      consume<T, kWarps, kBlocks, kNested, false>(args, shared, run, b);
    }
  } else if (warp == kWarps + 1) {
    barrier_signal(kBarriersReady, 64);
    barrier_sync(kTableBarrier, kThreads);
    reduce<T, Layout, kNormalises, kGates>(args, shared, run);
  } else {
    if (!args.constant_weights) grid_dependency_wait();
    int thread = threadIdx.x - kFirstDecoder * 32;
    float4 codes;
    if (kNested) codes = __ldcg(reinterpret_cast<const float4*>(args.weight.absmax_code) + thread);
    barrier_sync(kTableBarrier, kThreads);
    if (kNested) reinterpret_cast<float4*>(shared + Layout::kCode)[thread] = codes;
    barrier_sync(kDecoderBarrier, Layout::kDecoders * 32);
    decode_scales<Layout, kNested, kGates>(args, shared, run, warp - kFirstDecoder);
  }
}

// kTimed: one warp times its decoding. It is a kernel of its own, since a second loop beside the first, though
// no warp enters it, makes the first one up to 50 % slower (registers).
// kNormalises: the tokens are normalised (with one pass only). It is a kernel of its own, since code for it beside the other
// costs up to 7 % in the same way.
// kGates: the epilogue is a gated activation. It is a kernel of its own, since code for it beside the other costs up to 2 %.
template <typename T, int kWarps, int kBlocks, bool kNested, bool kTimed, bool kNormalises, bool kGates>
__global__ void __launch_bounds__(RowsLayout<kWarps, kBlocks, kNested>::kThreads, 1)
    linear_rows(const __grid_constant__ RowsArgs args) {
// Elsewhere linear_mma is faster.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  run_linear_rows<T, kWarps, kBlocks, kNested, kTimed, kNormalises, kGates>(args);
#else
  __trap();
#endif
}

}  // namespace nf4
