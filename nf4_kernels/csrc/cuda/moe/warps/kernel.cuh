// GEMMs of few choices with experts' NF4 weights of short rows, where each warp has units of its own: the weights of each
// chosen expert are read once and stream past the activations of up to 8 of its choices.
//
// A thread block finds the groups itself (../groups.cuh). The units of all groups are divided evenly over the thread blocks,
// and a block's over its warps; a unit is one group and 16 or 32 weight rows. A warp goes through a unit's k in steps of
// 256: it copies codes into its own ring of stages, ahead of their multiplication and across units; turns a step's codes
// into A operands through the table of linear_rows; loads activations a step ahead, and scales before the epilogue of the
// unit in front; and is the epilogue. No warp waits for another one. Where there are few tokens, thread blocks have all
// groups for some rows, and add up each token's choices at the end.
#pragma once

#include "multiply.cuh"

namespace nf4 {

// Adds up each token's choices of the thread block's row groups, whose results lie in shared memory as [row group][choice]
// [row], behind the choices' routing weights. Results of choices whose expert does not exist are zeros.
template <typename T, typename Layout>
__device__ __forceinline__ void add_choices(const MoeWarpsArgs& args, const float* routing, const float* added) {
  Share share(1, args.row_groups);
  for (int i = threadIdx.x; i < share.count * args.tokens * Layout::kRows; i += Layout::kThreads) {
    int r = i % Layout::kRows, token = i / Layout::kRows % args.tokens, group = i / Layout::kRows / args.tokens;
    const float* from = added + (group * args.choices + token * args.top_k) * Layout::kRows + r;
    float sum = 0.0f;
    for (int j = 0; j < args.top_k; ++j) {
      sum = __fadd_rn(sum, __fmul_rn(routing[token * args.top_k + j], from[j * Layout::kRows]));
    }
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
                                          const HeldGroups<Layout::kSize>& held, float* routing, float* added) {
  constexpr int kStages = Layout::kStages;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  WarpUnits unit(args, groups, Layout::kWarps);
  StepLoads<Layout> loads(args, shared_address(shared), unit, held.experts);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loads.issue(args, stage);
  UnitSums<T, Layout> sums;
  sums.look_ahead(args, unit, held);
  sums.load_scales(args, unit, held);
  if (args.follows_gated) wait_for_launches();
  sums.load_first_step(args);
  if (args.adds) {
#pragma unroll 1
    for (int i = threadIdx.x; i < args.choices; i += Layout::kThreads) {
      // A choice whose expert does not exist gives zeros whatever its weight is.
      bool known = static_cast<unsigned>(load_fresh(args.experts + i)) < static_cast<unsigned>(args.num_experts);
      float by = load_fresh(args.routing + i);
      routing[i] = known ? by : 0.0f;
    }
  }
  // The lane's codes of k block 0 in a stage; those of block j are at that address with 32 j added by exclusive or.
  unsigned my_codes = shared_address(shared) + Layout::kRing + warp * Layout::kWarpBytes + g * 128 +
                      (t / 2 ^ 2 * (g % 4)) * 16 + t % 2 * 8;
  unsigned lane_offset = lane * 4;
  // Otherwise the compiler computes them again for each step.
  asm volatile("" : "+r"(my_codes), "+r"(lane_offset));
  const float* code = reinterpret_cast<const float*>(shared + Layout::kCode);
  int stage = 0, first_row_group = Share(1, args.row_groups).first;
  while (unit.left > 0) {
    WarpUnits next = unit;
    next.next();
    sums.look_ahead(args, next, held);
    for (int step = 0; step < args.steps; ++step) {
      wait_stages<kStages - 2>();
      __syncwarp();
      // The stage of the step before, which all lanes have read, is the next one to be filled.
      loads.issue(args, stage == 0 ? kStages - 1 : stage - 1);
      if (step == 0) sums.begin(code);
      sums.add_step(args, my_codes + stage * Layout::kStageBytes, lane_offset, step);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    sums.load_scales(args, next, held);
    int before = args.adds ? (unit.row_group() - first_row_group) * args.choices * Layout::kRows : 0;
    sums.finish(args, unit, held, added + before);
    unit = next;
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
  float* routing = reinterpret_cast<float*>(shared + Layout::kHeld + held.bytes(args.held_groups));
  float* added = routing + args.choices;
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
  run_units<T, Layout>(args, shared, groups, held, routing, added);
  if (args.adds) {
    __syncthreads();
    add_choices<T, Layout>(args, routing, added);
  } else if (!args.partial) {
    zero_unknown(args.experts, args.num_experts, args.choices, static_cast<T*>(args.out), args.n,
                 blockIdx.x * Layout::kWarps + warp, gridDim.x * Layout::kWarps);
  }
#endif
}

}  // namespace nf4
