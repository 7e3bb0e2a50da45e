// The C entry of rows.cuh: it validates what is asked, fills the kernel's arguments and launches the instance that the plan
// names, with a launch that lists the groups in front and one that adds up choices, or parts of k, behind where they are needed.
#include "gated_sums.cuh"
#include "instances.cuh"
#include "sort.cuh"

namespace nf4 {
namespace {

// Whether weights can be copied in boxes.
bool boxes_fit(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  bool few_blocks = moe.num_experts * w.n * (w.k / 64) < int64_t{1} << 32;  // they are counted with 32 bits
  return plan.parts == 1 && w.blocksize == 64 && few_blocks &&
         reinterpret_cast<uintptr_t>(w.packed) % 16 == 0 && has_hopper_launches() && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
}

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
cudaError_t launch_instance(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  if (boxes_fit(args, moe, plan)) {
    cudaError_t status = launch_boxed_moe_rows(args, moe, plan);
    if (status != cudaErrorInvalidValue) return status;
  }
  switch (plan.tiles) {
    case 1:
      return launch_moe_rows_of_1_tile(args, moe, plan);
    case 2:
      return launch_moe_rows_of_2_tiles(args, moe, plan);
    case 4:
      return launch_moe_rows_of_4_tiles(args, moe, plan);
  }
  return cudaErrorInvalidValue;
}

// Whether the plan fits these operands and this device.
cudaError_t validate(const Nf4Moe& moe, const MoeRowsPlan& plan) {
  const Nf4Weight& w = moe.weight;
  if (w.k % 64 || w.blocksize < 64 || moe.dtype == NF4_FLOAT32 || moe.num_experts < 1) return cudaErrorInvalidValue;
  if (moe.activation && (w.n % 2 || moe.routing)) return cudaErrorInvalidValue;
  if (plan.parts < 1 || plan.held_groups % 2) return cudaErrorInvalidValue;
  if (moe.num_experts * w.n >= int64_t{1} << 31 || moe_choices(moe) >= 1 << 30) return cudaErrorInvalidValue;
  bool fits = !plan.sorted && plan.parts == 1 && moe_choices(moe) <= plan.tiles * 8;
  if (plan.adds && (!fits || !moe.routing || moe.activation)) return cudaErrorInvalidValue;
  if (!plan.sorted && moe_choices(moe) > 1024) return cudaErrorInvalidValue;
  if (reserves_shared_memory() && device_attribute(cudaDevAttrReservedSharedMemoryPerBlock) != kSharedBase) {
    return cudaErrorNotSupported;
  }
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
  args.follows_gated = moe.follows_gated && !plan.sorted;
  args.n = static_cast<int>(w.n);
  // With k in parts the launch behind computes the activation.
  args.activation = plan.parts == 1 ? moe.activation : NF4_NO_ACTIVATION;
  args.columns = static_cast<int>(args.activation ? w.n / 2 : w.n);
  args.k = static_cast<int>(w.k);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.scale_shift = log2_of(w.blocksize / 64);
  args.part_blocks = plan.part_blocks;
  args.parts = plan.parts;
  args.halves = (args.columns + kHalfRows - 1) / kHalfRows;
  args.row_groups = args.activation ? args.halves : (args.halves + 1) / 2;
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
  if (moe.activation) {
    sums.wide = args.n % 8 == 0;
    return moe.dtype == NF4_FLOAT16 ? launch_gated_sums<__half>(sums, moe.activation, moe.stream)
                                    : launch_gated_sums<__nv_bfloat16>(sums, moe.activation, moe.stream);
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
    status = nf4::launch_sort(*moe, nf4::sort_args(*moe, plan->tiles * 8, &args.list));
    if (status != cudaSuccess) return status;
    workspace += nf4::list_bytes(args.list.capacity, args.list.size);
  }
  bool sums = !plan->adds && (moe->routing || plan->parts > 1);
  if (sums) args.partial = reinterpret_cast<float*>(workspace);
  status = nf4::launch_instance(args, *moe, *plan);
  return status != cudaSuccess || !sums ? status : nf4::add_up(*moe, args);
}
