// A launch of rows.cuh, for the files beside this one.
#pragma once

#include "../instances.cuh"
#include "../rows.cuh"

namespace nf4 {
namespace {

// Whether a plan fits its instance.
template <typename Layout>
bool fits(const MoeRowsArgs& args, const MoeRowsPlan& plan) {
  if (plan.stages < 2 || plan.stages > Layout::kStageLimit || Layout::kUnitBlocks < plan.part_blocks) return false;
  int ring = plan.stages * Layout::kStageBytes;
  return plan.sorted || args.choices <= 32 || group_scratch_bytes(args.choices, args.num_experts) <= ring;
}

template <typename Layout, int kTiles>
int shared_bytes(const MoeRowsPlan& plan) {
  return Layout::total(plan.stages) + HeldGroups<kTiles * 8>::bytes(plan.held_groups);
}

template <typename T, int kWarps, int kTeams, int kBlocks, int kTiles, bool kNested>
cudaError_t launch(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  using Layout = MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested>;
  if (!fits<Layout>(args, plan)) return cudaErrorInvalidValue;
  return launch_kernel(moe_rows<T, kWarps, kTeams, kBlocks, kTiles, kNested>,
                       {plan.grid, Layout::kThreads, shared_bytes<Layout, kTiles>(plan)}, moe.stream, args);
}

template <int kWarps, int kTeams, int kBlocks, int kTiles>
cudaError_t launch(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  bool nested = moe.weight.absmax_8bit != nullptr;
#ifndef NF4_BF16_ONLY
  if (moe.dtype == NF4_FLOAT16) {
    return nested ? launch<__half, kWarps, kTeams, kBlocks, kTiles, true>(args, moe, plan)
                  : launch<__half, kWarps, kTeams, kBlocks, kTiles, false>(args, moe, plan);
  }
#endif
  return nested ? launch<__nv_bfloat16, kWarps, kTeams, kBlocks, kTiles, true>(args, moe, plan)
                : launch<__nv_bfloat16, kWarps, kTeams, kBlocks, kTiles, false>(args, moe, plan);
}

}  // namespace
}  // namespace nf4

#define NF4_INSTANCE(WARPS, TEAMS, BLOCKS)                                          \
  if (plan.warps == WARPS && plan.teams == TEAMS && plan.blocks == BLOCKS) {     \
    return launch<WARPS, TEAMS, BLOCKS, kTiles>(args, moe, plan);                   \
  }
