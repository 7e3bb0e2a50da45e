// The C entry of linear_rows.cuh: it validates what is asked, fills the kernel's arguments and launches the instance that
// the plan names.
#include "../device.cuh"
#include "linear_rows.cuh"

// linear_rows_timed.cu compiles this again, for the kernels that time their decoding: bfloat16 that they neither normalise
// nor gate.
#ifndef NF4_TIMED
#define NF4_TIMED false
#define NF4_LINEAR_ROWS nf4_cuda_linear_rows
#endif

namespace nf4 {
namespace {

template <typename T, int kWarps, int kBlocks, bool kNested, bool kNormalises, bool kGates = false>
cudaError_t launch(const RowsArgs& args, int grid, void* stream) {
  using Layout = RowsLayout<kWarps, kBlocks, kNested>;
  if (args.stages < 1 || args.stages > Layout::kStageLimit) return cudaErrorInvalidValue;
  auto* kernel = linear_rows<T, kWarps, kBlocks, kNested, NF4_TIMED, kNormalises, kGates>;
  int shared = Layout::total(args.stages, args.cluster, args.passes > 1 ? args.chunk : 0);
  dim3 blocks(static_cast<unsigned>(grid));
  return launch_kernel(kernel, {blocks, Layout::kThreads, shared, args.cluster > 1 ? args.cluster : 0}, stream, args);
}

template <int kWarps, int kBlocks>
cudaError_t launch(const RowsArgs& args, int dtype, int grid, void* stream) {
  bool nested = args.weight.absmax_8bit != nullptr;
#ifndef NF4_BF16_ONLY
  if constexpr (!NF4_TIMED) {
    if (dtype == NF4_FLOAT16) {
      return nested ? launch<__half, kWarps, kBlocks, true, false>(args, grid, stream)
                    : launch<__half, kWarps, kBlocks, false, false>(args, grid, stream);
    }
  }
#endif
  if constexpr (!NF4_TIMED) {
    if (args.gate.columns) {
      return nested ? launch<__nv_bfloat16, kWarps, kBlocks, true, true, true>(args, grid, stream)
                    : launch<__nv_bfloat16, kWarps, kBlocks, false, true, true>(args, grid, stream);
    }
    if (args.norm_weight) {
      return nested ? launch<__nv_bfloat16, kWarps, kBlocks, true, true>(args, grid, stream)
                    : launch<__nv_bfloat16, kWarps, kBlocks, false, true>(args, grid, stream);
    }
  }
  return nested ? launch<__nv_bfloat16, kWarps, kBlocks, true, false>(args, grid, stream)
                : launch<__nv_bfloat16, kWarps, kBlocks, false, false>(args, grid, stream);
}

// Whether the plan fits these operands and this device.
cudaError_t validate(const Nf4Linear& linear, const RowsPlan& plan) {
  const Nf4Weight& w = linear.weight;
  if (w.k % 64 || w.blocksize < 64 || linear.dtype == NF4_FLOAT32 || linear.tiles || !gate_fits(linear)) {
    return cudaErrorInvalidValue;
  }
  if (NF4_TIMED && (linear.norm_weight || linear.dtype != NF4_BFLOAT16)) return cudaErrorInvalidValue;
  // Other kernels gate what they do not normalise.
  if (linear.activation && !linear.norm_weight) return cudaErrorInvalidValue;
  if (linear.norm_weight && (linear.dtype != NF4_BFLOAT16 || plan.passes > 1)) return cudaErrorInvalidValue;
  if (linear.m > 8 || plan.blocks * plan.warps < plan.part_blocks) return cudaErrorInvalidValue;
  if (plan.cluster < 1 || plan.cluster > kMaxCluster || plan.grid % plan.cluster) return cudaErrorInvalidValue;
  if (!has_hopper_launches() || device_attribute(cudaDevAttrReservedSharedMemoryPerBlock) != kSharedBase) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
}

RowsArgs build_args(const Nf4Linear& linear, const RowsPlan& plan) {
  const Nf4Weight& w = linear.weight;
  RowsArgs args{};
  args.weight = w;
  args.x = linear.x;
  args.bias = linear.bias;
  args.residual = linear.residual;
  args.norm_weight = linear.norm_weight;
  args.norm_eps = linear.norm_eps;
  args.out = linear.out;
  args.m = static_cast<int>(linear.m);
  args.n = static_cast<int>(w.n);
  args.k = static_cast<int>(w.k);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.scale_shift = log2_of(w.blocksize / 64);
  args.place_first = w.group_offset << args.scale_shift;
  args.place_pitch = args.k_blocks + (w.group_skip << args.scale_shift);
  args.gate = gate_of(linear);
  int run_rows = args.gate.columns ? kRunRows<true> : kRunRows<false>;
  int units = (args.n + run_rows - 1) / run_rows, runs = plan.grid / plan.cluster;
  args.cluster = plan.cluster;
  args.passes = plan.passes;
  args.part_blocks = plan.part_blocks;
  args.stages = plan.stages;
  args.run_units = units / runs;
  args.runs_with_more = units % runs;
  args.chunk = plan.chunk;
  int pitch = args.k_blocks >> args.scale_shift;
  int bytes = pitch * (w.absmax_8bit ? 1 : 4);
  args.scale_pitch = args.k_blocks % (1 << args.scale_shift) == 0 && bytes % 16 == 0 ? pitch : 0;
  args.whole_rows = args.scale_pitch || bytes >= 16;
  args.constant_weights = linear.constant_weights;
  args.clock = linear.clock;
  args.later_delay = args.part_blocks * 4;
  args.waiting_delay = args.m > 2 ? args.part_blocks * 11 - args.later_delay : 0;
  return args;
}

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
cudaError_t launch(const Nf4Linear& linear, const RowsPlan& plan, const RowsArgs& args) {
// nf4_kernels/plan/rows.py lists the same instances.
#define NF4_INSTANCE(WARPS, BLOCKS)                                             \
  if (plan.warps == WARPS && plan.blocks == BLOCKS) {                           \
    return launch<WARPS, BLOCKS>(args, linear.dtype, plan.grid, linear.stream); \
  }
  NF4_INSTANCE(8, 9)
  NF4_INSTANCE(8, 10)
  NF4_INSTANCE(12, 7)
  NF4_INSTANCE(16, 1)
  NF4_INSTANCE(16, 2)
  NF4_INSTANCE(16, 3)
  NF4_INSTANCE(16, 4)
  NF4_INSTANCE(16, 6)
  NF4_INSTANCE(16, 7)
  NF4_INSTANCE(16, 8)
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits the plan.
NF4_EXPORT int NF4_LINEAR_ROWS(const Nf4Linear* linear, const RowsPlan* plan) {
  cudaError_t status = nf4::validate(*linear, *plan);
  if (status != cudaSuccess) return status;
  return nf4::launch(*linear, *plan, nf4::build_args(*linear, *plan));
}
