// The C entry of rows.cuh: it validates what is asked, fills the kernel's arguments and launches the instance that the plan
// names, with a launch that lists the groups in front and one that adds up choices behind where they are needed.
#include "rows.cuh"
#include "sort.cuh"
#include "sums.cuh"

namespace nf4 {
namespace {

template <typename T, int kWarps, int kTeams, int kBlocks, int kTiles, bool kNested>
cudaError_t launch(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  using Layout = MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested>;
  if (plan.stages < 2 || plan.stages > Layout::kStageLimit || Layout::kUnitBlocks < plan.part_blocks) {
    return cudaErrorInvalidValue;
  }
  int ring = plan.stages * Layout::kStageBytes;
  if (!plan.sorted && args.choices > 32 && group_scratch_bytes(args.choices, args.num_experts) > ring) {
    return cudaErrorInvalidValue;
  }
  int shared = Layout::total(plan.stages) + HeldGroups<kTiles * 8>::bytes(plan.held_groups);
  return launch_dependent(moe_rows<T, kWarps, kTeams, kBlocks, kTiles, kNested>, plan.grid, Layout::kThreads, shared,
                          moe.stream, args);
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

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
cudaError_t launch_instance(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
// nf4_kernels/plan/moe.py lists the same instances.
#define NF4_INSTANCE(WARPS, TEAMS, BLOCKS, TILES)                                                                      if (plan.warps == WARPS && plan.teams == TEAMS && plan.blocks == BLOCKS && plan.tiles == TILES) {                   return launch<WARPS, TEAMS, BLOCKS, TILES>(args, moe, plan);                                                       }
#define NF4_INSTANCES_UP_TO_4(TEAMS, TILES)   NF4_INSTANCE(16, TEAMS, 1, TILES)           NF4_INSTANCE(16, TEAMS, 2, TILES)           NF4_INSTANCE(16, TEAMS, 3, TILES)           NF4_INSTANCE(16, TEAMS, 4, TILES)
  NF4_INSTANCES_UP_TO_4(1, 1)
  NF4_INSTANCE(16, 1, 8, 1)
  NF4_INSTANCES_UP_TO_4(2, 1)
  NF4_INSTANCES_UP_TO_4(4, 1)
  NF4_INSTANCES_UP_TO_4(1, 2)
  NF4_INSTANCES_UP_TO_4(2, 2)
  NF4_INSTANCES_UP_TO_4(4, 2)
  NF4_INSTANCE(16, 1, 1, 4)
  NF4_INSTANCE(16, 1, 2, 4)
#ifndef NF4_BF16_ONLY
  NF4_INSTANCE(8, 1, 1, 1)
  NF4_INSTANCE(8, 1, 2, 1)
  NF4_INSTANCE(4, 1, 2, 2)
#endif
#undef NF4_INSTANCES_UP_TO_4
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

// Whether the plan fits these operands and this device.
cudaError_t validate(const Nf4Moe& moe, const MoeRowsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  if (w.k % 64 || w.blocksize < 64 || moe.dtype == NF4_FLOAT32 || moe.num_experts < 1) return cudaErrorInvalidValue;
  if (moe.activation && (plan.parts != 1 || w.n % 2 || moe.routing)) return cudaErrorInvalidValue;
  if (plan.parts < 1 || plan.held_groups % 2) return cudaErrorInvalidValue;
  if (moe.num_experts * w.n >= int64_t{1} << 31 || moe_choices(moe) >= 1 << 30) return cudaErrorInvalidValue;
  bool fits = !plan.sorted && plan.parts == 1 && moe_choices(moe) <= plan.tiles * 8;
  if (plan.adds && (!fits || !moe.routing || moe.activation)) return cudaErrorInvalidValue;
  if (!plan.sorted && moe_choices(moe) > 1024) return cudaErrorInvalidValue;
  if (moe_hopper() && moe_attribute(cudaDevAttrReservedSharedMemoryPerBlock) != kSharedBase) return cudaErrorNotSupported;
  return cudaSuccess;
}

MoeRowsArgs build_args(const Nf4Moe& moe, const MoeRowsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  MoeRowsArgs args{};
  args.weight = w;
  args.x = moe.x;
  args.experts = moe.experts;
  args.bias = moe.bias;
  args.routing = moe.routing;
  args.out = moe.out;
  args.choices = static_cast<int>(moe_choices(moe));
  args.num_experts = moe.num_experts;
  args.x_choices = moe.x_of_choices ? 1 : moe.top_k;
  args.top_k = moe.top_k;
  args.tokens = static_cast<int>(moe.tokens);
  args.all_columns = !plan.sorted && args.choices <= plan.tiles * 8;
  args.adds = plan.adds;
  args.n = static_cast<int>(w.n);
  args.columns = static_cast<int>(moe.activation ? w.n / 2 : w.n);
  args.activation = moe.activation;
  args.k = static_cast<int>(w.k);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.scale_shift = log2_of(w.blocksize / 64);
  args.part_blocks = plan.part_blocks;
  args.parts = plan.parts;
  args.halves = (args.columns + kHalfRows - 1) / kHalfRows;
  args.row_groups = moe.activation ? args.halves : (args.halves + 1) / 2;
  args.stages = plan.stages;
  args.held_groups = plan.held_groups;
  return args;
}

cudaError_t add_up(const Nf4Moe& moe, const MoeRowsArgs& args) {
  SumArgs sums{args.partial, args.experts, nullptr, moe.out, static_cast<int>(moe.tokens), moe.top_k, moe.num_experts,
               args.parts, args.n, args.n % 4 == 0};
  if (!moe.routing) {
    sums.tokens = args.choices;
    sums.top_k = 1;
  }
  return moe.dtype == NF4_FLOAT16 ? launch_sums<__half, float>(sums, moe.stream)
                                  : launch_sums<__nv_bfloat16, float>(sums, moe.stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits the plan.
NF4_EXPORT int nf4_cuda_moe_rows(const Nf4Moe* moe, const MoeRowsPlan* plan) {
  cudaError_t status = nf4::validate(*moe, *plan);
  if (status != cudaSuccess) return status;
  nf4::MoeRowsArgs args = nf4::build_args(*moe, *plan);
  char* workspace = static_cast<char*>(moe->workspace);
  if (plan->sorted) {
    status = nf4::launch_sort(*moe, plan->tiles * 8, &args.list);
    if (status != cudaSuccess) return status;
    workspace += nf4::list_bytes(args.list.capacity, args.list.size);
  }
  bool sums = !plan->adds && (moe->routing || plan->parts > 1);
  if (sums) args.partial = reinterpret_cast<float*>(workspace);
  status = nf4::launch_instance(args, *moe, *plan);
  return status != cudaSuccess || !sums ? status : nf4::add_up(*moe, args);
}
