// GEMMs of few choices with experts' NF4 weights: the weights of each chosen expert are read once and stream past the
// activations of up to 8 (16, 32) of its choices, which stay in registers.
//
// A thread block finds the groups itself (groups.cuh) or takes them from a list. The units of all groups are divided evenly
// over the thread blocks; a unit is one group, one part of k and 16 weight rows. A unit is computed as linear_rows computes a
// row group (rows/linear_rows.cuh tells it): a producer warp, two warps that decode scales, consumer warps that share k, and
// a warp that reduces their sums and is the epilogue.
#pragma once

#include "../rows/linear_rows.cuh"
#include "activation.cuh"
#include "rows_work.cuh"

namespace nf4 {

// Loads the activations of a group that a consumer warp needs, as B registers; columns without a choice are zeros.
template <typename T, int kWarps, int kBlocks, int kTiles>
__device__ __forceinline__ void load_group(const MoeRowsArgs& args, const int* choices, int part,
                                           uint4 (&b)[kBlocks][kTiles][2]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = part * args.part_blocks, end = min(begin + args.part_blocks, args.k_blocks);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    int choice = args.same_x ? 0 : choices[tile * 8 + g];
    const T* row = static_cast<const T*>(args.x) + int64_t{max(choice, 0) / args.x_choices} * args.k + t * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      int block = begin + i * kWarps + warp;
      bool valid = block < end && choice >= 0;
      const uint4* from = reinterpret_cast<const uint4*>(row + block * 64);
      // These are no __ldg, since the kernel in front may write them after this one has started.
      b[i][tile][0] = valid ? *from : make_uint4(0, 0, 0, 0);
      b[i][tile][1] = valid ? from[1] : make_uint4(0, 0, 0, 0);
    }
  }
}

template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested>
__device__ __forceinline__ void consume_units(const MoeRowsArgs& args, char* shared, MoeRun run,
                                              const HeldGroups<kTiles * 8>& held) {
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4;
  const char* my_bytes = shared + Layout::kRing + g * Layout::kWeightPitch + warp * 32 + t * 8;
  const char* my_scales = shared + Layout::scale_slot(0, warp) + g * 8;
  float4* my_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + warp * kTiles * 32 + lane;
  uint4 b[kBlocks][kTiles][2];
  RingPosition ring, sums;
  int loaded_group = -1, loaded_part = -1;
  for (; !run.done(); run.next(args)) {
    if (run.part != loaded_part || (run.at != loaded_group && (loaded_group < 0 || !args.same_x))) {
      load_group<T, kWarps, kBlocks, kTiles>(args, held.choices_of(run.at), run.part, b);
      loaded_part = run.part;
    }
    loaded_group = run.at;
    float acc[kTiles][4] = {};
    const char* bytes = my_bytes + ring.stage * Layout::kStageBytes;
    const char* scales = my_scales + ring.stage * Layout::kDecodedStage;
    int count = min(args.part_blocks, args.k_blocks - run.part * args.part_blocks) - warp;
    barrier_wait(Layout::decoded(base, ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i * kWarps >= count) break;
      uint2 upper = *reinterpret_cast<const uint2*>(bytes + i * kWarps * 32);
      uint2 lower = *reinterpret_cast<const uint2*>(bytes + 8 * Layout::kWeightPitch + i * kWarps * 32);
      float part_sum[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        unsigned a[4];
        decode_codes(a, upper, lower, step, lane_offset, true, true);
        mma_step<T>(part_sum, a, b[i], step);
      }
      static_assert(kWarps % 2 == 0, "two k blocks share a slot row");
      float2 scale = *reinterpret_cast<const float2*>(scales + i * (kWarps / 2) * kTableStride);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        acc[tile][0] += scale.x * part_sum[tile][0];
        acc[tile][1] += scale.x * part_sum[tile][1];
        acc[tile][2] += scale.y * part_sum[tile][2];
        acc[tile][3] += scale.y * part_sum[tile][3];
      }
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
}

// Bias, activation or routing weight, and the result of two rows (or of a gate and its up) of one choice.
template <typename T>
__device__ __forceinline__ void write_unit(const MoeRowsArgs& args, const MoeRun& run, int expert, int choice,
                                           float upper, float lower) {
  int g = threadIdx.x % 32 / 4;
  const T* bias = static_cast<const T*>(args.bias) + int64_t{expert} * args.n;
  if (args.activation) {
    int column = run.row_group * kHalfRows + g;
    if (column >= args.columns) return;
    if (args.bias) {
      upper += to_float(bias[column]);
      lower += to_float(bias[column + args.columns]);
    }
    static_cast<T*>(args.out)[int64_t{choice} * args.columns + column] =
        from_float<T>(gated_activation(args.activation, upper, lower));
    return;
  }
  float by = args.routing ? load_fresh(args.routing + choice) : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = run.row_group * kGroupRows + half * kHalfRows + g;
    if (row >= args.n) return;
    float value = half ? lower : upper;
    if (args.bias && run.part == 0) value += to_float(bias[row]);
    int64_t at = int64_t{choice} * args.n + row;
    if (args.partial) {
      args.partial[run.part * (int64_t{args.choices} * args.n) + at] = by * value;
    } else {
      static_cast<T*>(args.out)[at] = from_float<T>(value);
    }
  }
}

template <typename T, int kWarps, int kTiles, typename Layout>
__device__ __forceinline__ void reduce_units(const MoeRowsArgs& args, char* shared, MoeRun run,
                                             const HeldGroups<kTiles * 8>& held) {
  if (!args.partial) {
    zero_unknown(args.experts, args.num_experts, args.choices, static_cast<T*>(args.out), args.columns, blockIdx.x,
                 gridDim.x);
  }
  int t = threadIdx.x % 4;
  Reduction<kTiles> at;
  for (; !run.done(); run.next(args)) {
    sum_warps<kWarps, kTiles, Layout>(shared, at);
    int expert = held.experts[run.at];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int2 choices = *reinterpret_cast<const int2*>(held.choices_of(run.at) + tile * 8 + t * 2);
      float4 sum = at.sum[tile];
      constexpr float kBy = kShrink<T>;
      if (choices.x >= 0) write_unit<T>(args, run, expert, choices.x, sum.x * kBy, sum.z * kBy);
      if (choices.y >= 0) write_unit<T>(args, run, expert, choices.y, sum.y * kBy, sum.w * kBy);
    }
  }
}

template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested>
__global__ void __launch_bounds__((kWarps + kNonConsumerWarps<kWarps, kTiles>) * 32, 1)
    moe_rows(const __grid_constant__ MoeRowsArgs args) {
#if __CUDA_ARCH__ >= 800
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  static_assert(Layout::kDecoders == 2, "four warps beside the consumers");
  constexpr int kSize = kTiles * 8;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if ((base & 0xffffff) != kSharedBase || Layout::total(2, 1, 0) > kSharedBytes) __trap();
  int warp = threadIdx.x / 32;
  HeldGroups<kSize> held(shared + Layout::total(args.stages, 1, 0), args.held_groups);
  if (warp == kWarps) init_copy_barriers<Layout>(base);
  if (warp == kWarps + 1) init_other_barriers<Layout>(base, kWarps);
  if (warp < kWarps) {
    for (int first = warp; first < 16; first += kWarps) build_table<T>(shared, first);
  }
  clear_held(held);
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  if (kNested && warp >= kWarps + 2) {
    int i = threadIdx.x - (kWarps + 2) * 32;
    reinterpret_cast<float4*>(shared + Layout::kCode)[i] =
        __ldcg(reinterpret_cast<const float4*>(args.weight.absmax_code) + i);
  }
  int units = args.parts * args.row_groups, groups;
  if (args.list.words) {
    groups = take_listed<kSize>(args.list, units, held);
  } else if (args.choices <= 32) {
    groups = group_few<kSize>(args.experts, args.num_experts, args.choices, units, held);
  } else {
    groups = group_many<kSize>(args.experts, args.num_experts, args.choices, units, shared + Layout::kRing, held);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies come where the counts were
#endif
  }
  __syncthreads();
  MoeRun run(args, groups);
  if (warp == kWarps) {
    load_units<Layout, kNested>(args, base, run, held.experts);
  } else if (warp < kWarps) {
    consume_units<T, kWarps, kBlocks, kTiles, kNested>(args, shared, run, held);
  } else if (warp == kWarps + 1) {
    reduce_units<T, kWarps, kTiles, Layout>(args, shared, run, held);
  } else {
    decode_unit_scales<Layout, kNested>(args, shared, run, held.experts, warp - kWarps - 2);
  }
#endif
}

}  // namespace nf4
