// GEMMs of few choices with experts' NF4 weights: the weights of each chosen expert are read once and stream past the
// activations of up to 8 (16, 32) of its choices, which stay in registers.
//
// A thread block finds the groups itself (groups.cuh) or takes them from a list. The units of all groups are divided evenly
// over the thread blocks; a unit is one group, one part of k and 16 weight rows. A unit is computed as linear_rows computes a
// row group (../rows/linear_rows.cuh tells it): a producer warp, two warps that decode scales, consumer warps that share k,
// and a warp that reduces their sums and is the epilogue (rows_epilogue.cuh). Where k is short, consumer warps work in teams
// with a unit each, since one unit would be too little for all of them.
#pragma once

#include "rows_boxes.cuh"
#include "rows_epilogue.cuh"

namespace nf4 {

// Loads the activations of a group that a consumer warp needs, as B registers; columns without a choice are zeros.
template <typename T, typename Layout, int kBlocks, int kTiles>
__device__ __forceinline__ void load_group(const MoeRowsArgs& args, const int* choices, int part, int warp,
                                           uint4 (&b)[kBlocks][kTiles][2]) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = part * args.part_blocks, end = min(begin + args.part_blocks, args.k_blocks);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    int column = tile * 8 + g;
    int choice = !args.all_columns ? choices[column] : column < args.choices ? column : -1;
    const T* row = static_cast<const T*>(args.x) + int64_t{max(choice, 0) / args.x_choices} * args.k + t * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      int block = begin + i * Layout::kTeamWarps + warp;
      bool valid = block < end && choice >= 0;
      const uint4* from = reinterpret_cast<const uint4*>(row + block * 64);
      // These are no __ldg, since the kernel in front may write them after this one has started.
      b[i][tile][0] = valid ? *from : make_uint4(0, 0, 0, 0);
      b[i][tile][1] = valid ? from[1] : make_uint4(0, 0, 0, 0);
    }
  }
}

template <typename T, typename Layout, int kBlocks, int kTiles>
__device__ __forceinline__ void consume_units(const MoeRowsArgs& args, char* shared, MoeRun run,
                                              const HeldGroups<kTiles * 8>& held) {
  constexpr int kWarps = Layout::kWarps, kTeamWarps = Layout::kTeamWarps, kTeams = Layout::kTeams;
  int warp = threadIdx.x / 32 % kTeamWarps, team = threadIdx.x / 32 / kTeamWarps;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4;
  int row = Layout::row_of(g);
  // A lane's codes in a stage; those of 8 rows below; and those of its warp's next k block.
  constexpr int kBelow = Layout::kBoxed ? 1024 : 8 * Layout::kWeightPitch;
  constexpr int kNextBlock = Layout::kBoxed ? kTeamWarps * 512 : kTeamWarps * 32;
  int my_bytes = Layout::codes(0, team) +
                 (Layout::kBoxed ? warp / 4 * 2048 + row * 128 + ((warp % 4 * 2 + t / 2) ^ row) * 16 + t % 2 * 8
                                 : g * Layout::kWeightPitch + warp * 32 + t * 8);
  int my_scales = Layout::scale_slot(0, team * Layout::kUnitBlocks + warp) + row * 8;
  // Otherwise the compiler computes them again for each unit.
  if constexpr (Layout::kBoxed) asm volatile("" : "+r"(my_bytes), "+r"(my_scales));
  float4* my_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + threadIdx.x / 32 * kTiles * 32 + lane;
  uint4 b[kBlocks][kTiles][2];
  RingPosition ring, sums;
  int loaded_group = -1, loaded_part = -1;
  while (!run.done()) {
    for (int i = 0; i < team && !run.done(); ++i) run.next(args);
    bool mine = !run.done();
    if (mine && (run.part != loaded_part || (run.at != loaded_group && !args.all_columns))) {
      load_group<T, Layout, kBlocks, kTiles>(args, held.choices_of(run.at), run.part, warp, b);
      loaded_part = run.part;
      loaded_group = run.at;
    }
    float acc[kTiles][4] = {};
    const char* bytes = shared + my_bytes + ring.stage * Layout::kStageBytes;
    const char* scales = shared + my_scales + ring.stage * Layout::kDecodedStage;
    int count = mine ? min(args.part_blocks, args.k_blocks - run.part * args.part_blocks) - warp : 0;
    if constexpr (Layout::kBoxed) barrier_wait(Layout::full(base, ring.stage), ring.parity);
    barrier_wait(Layout::decoded(base, ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      // Boxes are of whole units. (A team without a unit multiplies anything; its sums are not read.)
      if (!Layout::kBoxed && i * kTeamWarps >= count) break;
      uint2 upper = *reinterpret_cast<const uint2*>(bytes + i * kNextBlock);
      uint2 lower = *reinterpret_cast<const uint2*>(bytes + kBelow + i * kNextBlock);
      float part_sum[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        unsigned a[4];
        decode_codes(a, upper, lower, step, lane_offset, true);
        mma_step<T>(part_sum, a, b[i], step);
      }
      static_assert(kTeamWarps % (Layout::kBoxed ? 4 : 2) == 0, "two k blocks share a slot row, four a box's line");
      float2 scale = *reinterpret_cast<const float2*>(scales + i * (kTeamWarps / 2) * kTableStride);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        acc[tile][0] += scale.x * part_sum[tile][0];
        acc[tile][1] += scale.x * part_sum[tile][1];
        acc[tile][2] += scale.y * part_sum[tile][2];
        acc[tile][3] += scale.y * part_sum[tile][3];
      }
    }
    arrive_as_warp<Layout>(Layout::empty(base, ring.stage));
    ring.advance(args.stages);
    barrier_wait(Layout::sums_empty(base, sums.stage), sums.parity ^ 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      my_sums[sums.stage * kWarps * kTiles * 32 + tile * 32] =
          make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
    }
    arrive_as_warp<Layout>(Layout::sums_full(base, sums.stage));
    sums.advance(2);
    for (int i = team; i < kTeams && !run.done(); ++i) run.next(args);
  }
}

// Fills held with the block's groups; returns how many groups there are in all.
template <int kSize>
__device__ __forceinline__ int find_groups(const MoeRowsArgs& args, char* scratch, const HeldGroups<kSize>& held) {
  int units = args.parts * args.row_groups;
  if (args.list.words) return take_listed<kSize>(args.list, units, held);
  if (args.choices <= 32) {
    return group_few<kSize>(args.experts, args.num_experts, args.choices, units, args.all_columns, args.adds, held);
  }
  int groups = group_many<kSize>(args.experts, args.num_experts, args.choices, units, false, scratch, held);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies come where the counts were
#endif
  return groups;
}

// map: that of the weights' boxes, where the layout has boxes.
template <typename T, typename Layout, int kBlocks, int kTiles, bool kNested>
__device__ __forceinline__ void run_moe_rows(const MoeRowsArgs& args, const void* map) {
  constexpr int kSize = kTiles * 8, kWarps = Layout::kWarps;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if ((base & 0xffffff) != kSharedBase) __trap();
  int warp = threadIdx.x / 32;
  HeldGroups<kSize> held(shared + Layout::total(args.stages), args.held_groups);
  if (warp == kWarps) init_copy_barriers<Layout>(base);
  if (Layout::kBoxed && threadIdx.x == kWarps * 32) prefetch_box_map(map);
  if (warp == kWarps + 1) {
    if constexpr (Layout::kBoxed) {
      init_box_barriers<Layout>(base);
    } else {
      init_other_barriers<Layout>(base, kWarps);
    }
  }
  if (warp < kWarps) {
    for (int first = warp; first < 16; first += kWarps) build_table<T>(shared, first);
  }
  clear_held(held);
  __syncthreads();
  if (!args.follows_gated) grid_dependency_wait();
  if (!args.follows_gated) launch_dependents();
  constexpr int kFirstReducer = kWarps + 1, kFirstDecoder = kFirstReducer + Layout::kReducers;
  if (kNested && warp >= kFirstDecoder && warp < kFirstDecoder + 2) {
    int i = threadIdx.x - kFirstDecoder * 32;
    reinterpret_cast<float4*>(shared + Layout::kCode)[i] =
        __ldcg(reinterpret_cast<const float4*>(args.weight.absmax_code) + i);
  }
  int groups = find_groups<kSize>(args, shared + Layout::kRing, held);
  __syncthreads();
  MoeRun run(args, groups);
  // Activations are waited for here, and results are not written earlier.
  if (args.follows_gated && (warp < kWarps || (warp > kWarps && warp < kFirstDecoder))) grid_dependency_wait();
  if (args.follows_gated && warp == 0) launch_dependents();
  if (warp < kWarps) {
    consume_units<T, Layout, kBlocks, kTiles>(args, shared, run, held);
  } else if (warp == kWarps) {
    if constexpr (Layout::kBoxed) {
      load_boxes<Layout, kNested>(args, map, base, run, held.experts);
    } else {
      load_units<Layout, kNested>(args, base, run, held.experts);
    }
  } else if (warp < kFirstDecoder) {
    reduce_units<T, Layout, kTiles>(args, shared, run, held, warp - kFirstReducer);
  } else if constexpr (Layout::kBoxed) {
    decode_box_scales<Layout, kNested>(args, shared, run, held.experts, warp - kFirstDecoder);
  } else {
    decode_unit_scales<Layout, kNested>(args, shared, run, held.experts, warp - kFirstDecoder);
  }
}

template <typename T, int kWarps, int kTeams, int kBlocks, int kTiles, bool kNested>
__global__ void __launch_bounds__((kWarps + 4) * 32, 1) moe_rows(const __grid_constant__ MoeRowsArgs args) {
#if __CUDA_ARCH__ >= 800
  using Layout = MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested>;
  // For larger groups moe_wgmma is faster, and for shorter rows moe_warps.
  constexpr bool kOthersAreFaster = __CUDA_ARCH__ == 900 && (kTiles > 1 || kTeams > 2);
  if constexpr (kIsPlanned<Layout::total(2)> && !kOthersAreFaster) {
    run_moe_rows<T, Layout, kBlocks, kTiles, kNested>(args, nullptr);
  } else {
    __trap();
  }
#endif
}

// The same where a unit's k is that of the layout, and each 64 weights have a scale.
template <typename T, int kWarps, int kTeams, int kBlocks, int kTiles, bool kNested>
__global__ void __launch_bounds__(MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested, true>::kThreads, 1)
    moe_rows_boxed(const __grid_constant__ MoeRowsArgs args, const __grid_constant__ CUtensorMap map) {
#if __CUDA_ARCH__ >= 900
  run_moe_rows<T, MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested, true>, kBlocks, kTiles, kNested>(args, &map);
#endif
}

}  // namespace nf4
