// The C entry of kernel.cuh: it validates what is asked, fills the kernel's arguments and launches the instance that the plan
// names, with a launch behind that adds up choices where it is needed.
#include "../sums.cuh"
#include "kernel.cuh"

namespace nf4 {
namespace {

// Whether the plan fits these operands and this device.
cudaError_t validate(const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  if (w.k % 64 || w.k > kMostSteps * 256 || w.blocksize != 64) return cudaErrorInvalidValue;
  if (moe.dtype == NF4_FLOAT32 || moe.num_experts < 1) return cudaErrorInvalidValue;
  if (moe.activation || plan.held_groups % 2 || (plan.adds && !moe.routing)) return cudaErrorInvalidValue;
  // An expert's bytes, and k blocks of all experts, are counted with 32 bits.
  if (w.n * w.k >= int64_t{1} << 32 || moe.num_experts * w.n * (w.k / 64) >= int64_t{1} << 32) return cudaErrorInvalidValue;
  if (moe.num_experts * w.n >= int64_t{1} << 31 || moe_choices(moe) > 1024) return cudaErrorInvalidValue;
  if (reserves_shared_memory() && device_attribute(cudaDevAttrReservedSharedMemoryPerBlock) != kSharedBase) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
}

MoeWarpsArgs build_args(const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  MoeWarpsArgs args{};
  args.weight = w;
  args.x = moe.x;
  args.experts = moe.experts;
  args.bias = moe.bias;
  args.routing = moe.routing;
  args.out = moe.out;
  args.partial = moe.routing && !plan.adds ? static_cast<float*>(moe.workspace) : nullptr;
  args.choices = static_cast<int>(moe_choices(moe));
  args.num_experts = moe.num_experts;
  args.top_k = moe.top_k;
  args.tokens = static_cast<int>(moe.tokens);
  args.x_choices = moe.x_of_choices ? 1 : moe.top_k;
  args.n = static_cast<int>(w.n);
  args.k = static_cast<int>(w.k);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.steps = (args.k_blocks + kStepBlocks - 1) / kStepBlocks;
  args.row_groups = (args.n + plan.row_tiles * 16 - 1) / (plan.row_tiles * 16);
  args.held_groups = plan.held_groups;
  args.adds = plan.adds;
  args.follows_gated = moe.follows_gated;
  return args;
}

template <typename T, int kWarps, int kRowTiles, bool kNested, bool kWhole>
cudaError_t launch(const MoeWarpsArgs& args, const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  using Layout = MoeWarpsLayout<kWarps, kRowTiles, kNested, kWhole>;
  if (group_scratch_bytes(args.choices, args.num_experts) > kWarps * Layout::kWarpBytes) return cudaErrorInvalidValue;
  int shared = Layout::kHeld + HeldGroups<Layout::kSize>::bytes(plan.held_groups);
  if (plan.adds) shared += (1 + (args.row_groups + plan.grid - 1) / plan.grid * Layout::kRows) * args.choices * 4;
  return launch_kernel(moe_warps<T, Layout>, {plan.grid, Layout::kThreads, shared}, moe.stream, args);
}

// nf4_kernels/plan/moe.py lists the same warps and row tiles.
template <typename T, bool kNested, bool kWhole>
cudaError_t launch_instance(const MoeWarpsArgs& args, const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  if (plan.warps == 16 && plan.row_tiles == 1) return launch<T, 16, 1, kNested, kWhole>(args, moe, plan);
  if (plan.warps == 8 && plan.row_tiles == 2) return launch<T, 8, 2, kNested, kWhole>(args, moe, plan);
  return cudaErrorInvalidValue;
}

template <typename T, bool kNested>
cudaError_t launch_whole(const MoeWarpsArgs& args, const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  return args.k_blocks % kStepBlocks ? launch_instance<T, kNested, false>(args, moe, plan)
                                     : launch_instance<T, kNested, true>(args, moe, plan);
}

template <typename T>
cudaError_t launch_all(const Nf4Moe& moe, const MoeWarpsPlan& plan) {
  MoeWarpsArgs args = build_args(moe, plan);
  cudaError_t status = moe.weight.absmax_8bit ? launch_whole<T, true>(args, moe, plan) : launch_whole<T, false>(args, moe, plan);
  if (status != cudaSuccess || !args.partial) return status;
  SumArgs sums{args.partial, moe.experts, moe.routing, moe.out, args.tokens, args.top_k, args.num_experts, 1, args.n,
               args.n % 4 == 0};
  return launch_sums<T, float>(sums, moe.stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits the plan.
NF4_EXPORT int nf4_cuda_moe_warps(const Nf4Moe* moe, const MoeWarpsPlan* plan) {
  cudaError_t status = nf4::validate(*moe, *plan);
  if (status != cudaSuccess) return status;
  return moe->dtype == NF4_FLOAT16 ? nf4::launch_all<__half>(*moe, *plan) : nf4::launch_all<__nv_bfloat16>(*moe, *plan);
}
