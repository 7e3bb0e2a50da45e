// GEMMs of few choices with experts' NF4 weights of short rows, where each warp has units of its own: the weights of each
// chosen expert are read once and stream past the activations of up to 8 of its choices.
//
// A thread block finds the groups itself (../groups.cuh). The units of all groups are divided evenly over the thread blocks,
// and a block's over its warps; a unit is one group and 16 or 32 weight rows. A warp goes through a unit's k in steps of
// 256: it copies codes into its own ring of stages, ahead of their multiplication and across units; turns a step's codes into A
// operands through the table of linear_rows; loads scales and activations, which stay in L1 from unit to unit; and is
// the epilogue. No warp waits for another one. Where there are few tokens, thread blocks have all groups for some rows, and
// add up each token's choices at the end.
#pragma once

#include "multiply.cuh"

namespace nf4 {

// Adds up each token's choices of the thread block's row groups, whose results lie in shared memory as [row group][choice]
// [row]. Results of choices whose expert does not exist are zeros.
template <typename T, typename Layout>
__device__ __forceinline__ void add_choices(const MoeWarpsArgs& args, const float* added) {
  Share share(1, args.row_groups);
  for (int i = threadIdx.x; i < share.count * args.tokens * Layout::kRows; i += Layout::kThreads) {
    int r = i % Layout::kRows, token = i / Layout::kRows % args.tokens, group = i / Layout::kRows / args.tokens;
    const float* from = added + (group * args.choices + token * args.top_k) * Layout::kRows + r;
    float sum = 0.0f;
    for (int j = 0; j < args.top_k; ++j) sum += from[j * Layout::kRows];
    int row = (share.first + group) * Layout::kRows + r;
    if (row < args.n) static_cast<T*>(args.out)[int64_t{token} * args.n + row] = from_float<T>(sum);
  }
}

__device__ __forceinline__ void wait_for_launches() {
  grid_dependency_wait();
  launch_dependents();
}

template <typename T, typename Layout>
__device__ __forceinline__ void run_units(const MoeWarpsArgs& args, char* shared, int groups,
                                          const HeldGroups<Layout::kSize>& held, float* added) {
  constexpr int kStages = Layout::kStages;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  WarpUnits unit(args, groups, Layout::kWarps);
  StepLoads<Layout> loads(args, shared_address(shared), unit, held.experts);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loads.issue(args, stage);
  if (args.follows_gated) wait_for_launches();
  const char* my_codes = shared + Layout::kRing + warp * Layout::kWarpBytes + g * 128;
  const float* code = reinterpret_cast<const float*>(shared + Layout::kCode);
  int offsets[kStepBlocks];
#pragma unroll
  for (int j = 0; j < kStepBlocks; ++j) offsets[j] = ((2 * j + t / 2) ^ 2 * (g % 4)) * 16 + t % 2 * 8;
  UnitSums<T, Layout> sums;
  int stage = 0, first_row_group = Share(1, args.row_groups).first;
  for (; unit.left > 0; unit.next()) {
    sums.begin(args, unit, held);
    for (int step = 0; step < args.steps; ++step) {
      wait_stages<kStages - 2>();
      __syncwarp();
      // The stage of the step before, which all lanes have read, is the next one to be filled.
      loads.issue(args, stage == 0 ? kStages - 1 : stage - 1);
      sums.add_step(args, code, my_codes + stage * Layout::kStageBytes, step, offsets);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    int before = args.adds ? (unit.row_group() - first_row_group) * args.choices * Layout::kRows : 0;
    sums.finish(args, unit, held.experts[unit.at()], added + before);
  }
}

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1) moe_warps(const __grid_constant__ MoeWarpsArgs args) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  // Nothing is compiled for targets on which no plan fits either.
  if ((shared_address(shared) & 0xffffff) != kSharedBase || Layout::kHeld > kSharedBytes) __trap();
  constexpr int kSize = Layout::kSize;
  int warp = threadIdx.x / 32;
  HeldGroups<kSize> held(shared + Layout::kHeld, args.held_groups);
  for (int first = warp; first < 16; first += Layout::kWarps) build_table<T>(shared, first);
  clear_held(held);
  float* added = reinterpret_cast<float*>(shared + Layout::kHeld + held.bytes(args.held_groups));
  if (args.adds) {
    int count = Share(1, args.row_groups).count * args.choices * Layout::kRows;
    for (int i = threadIdx.x; i < count; i += Layout::kThreads) added[i] = 0.0f;
  }
  __syncthreads();
  if (!args.follows_gated) wait_for_launches();
  if (Layout::kNested && threadIdx.x < 64) {
    reinterpret_cast<float4*>(shared + Layout::kCode)[threadIdx.x] =
        __ldcg(reinterpret_cast<const float4*>(args.weight.absmax_code) + threadIdx.x);
  }
  int groups = args.choices <= 32
                   ? group_few<kSize>(args.experts, args.num_experts, args.choices, args.row_groups, false, args.adds, held)
                   : group_many<kSize>(args.experts, args.num_experts, args.choices, args.row_groups, args.adds,
                                       shared + Layout::kRing, held);
  __syncthreads();
  run_units<T, Layout>(args, shared, groups, held, added);
  if (args.adds) {
    __syncthreads();
    add_choices<T, Layout>(args, added);
  } else if (!args.partial) {
    zero_unknown(args.experts, args.num_experts, args.choices, static_cast<T*>(args.out), args.n,
                 blockIdx.x * Layout::kWarps + warp, gridDim.x * Layout::kWarps);
  }
#endif
}

}  // namespace nf4
