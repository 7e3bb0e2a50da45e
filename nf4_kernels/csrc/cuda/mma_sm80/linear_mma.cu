// The C entry of linear_mma.cuh: it validates what is asked, fills the kernel's arguments and launches the instance that the
// plan names.
#include "../device.cuh"
#include "instances.cuh"
#include "launch.cuh"
#include "linear_mma.cuh"
#include "norm.cuh"
#include "whole/launch.cuh"
#include "wide/launch.cuh"

namespace nf4 {
namespace {

template <typename T, int kWarps, int kTiles>
cudaError_t launch_instance(const MmaArgs& args, int grid, cudaStream_t stream) {
  using Shape = MmaShape<kWarps, kTiles>;
  // Thread blocks of split tiles wait for one another.
  return launch_blocks(linear_mma<T, kWarps, kTiles>, args, grid, Shape::kThreads, Shape::kTotal, true, stream);
}

template <int kWarps, int kTiles>
cudaError_t launch_instance(const MmaArgs& args, int dtype, int grid, cudaStream_t stream) {
#ifndef NF4_BF16_ONLY
  if (dtype == NF4_FLOAT16) return launch_instance<__half, kWarps, kTiles>(args, grid, stream);
#endif
  return launch_instance<__nv_bfloat16, kWarps, kTiles>(args, grid, stream);
}

bool is_wide(const MmaPlan& plan) { return !plan.row_warps && plan.tokens >= kWideTokens && plan.warps > 0; }

int tile_rows(const MmaPlan& plan) { return is_wide(plan) ? plan.warps * 64 : kMmaRows; }

// Whether the plan fits these operands and this device.
cudaError_t validate(const Nf4Linear& linear, const MmaPlan& plan) {
  const Nf4Weight& w = linear.weight;
  if (w.k % 64 || w.blocksize < 64 || linear.dtype == NF4_FLOAT32 || linear.tiles || !gate_fits(linear)) {
    return cudaErrorInvalidValue;
  }
  if (linear.m < 1 || plan.tokens < 8 || plan.grid < 1 || !linear.workspace || !linear.counters) {
    return cudaErrorInvalidValue;
  }
  if (linear.norm_weight && linear.dtype != NF4_BFLOAT16) return cudaErrorInvalidValue;
  int rows = tile_rows(plan);
  int64_t tiles = (w.n + rows - 1) / rows * ((linear.m + plan.tokens - 1) / plan.tokens);
  int64_t steps = tiles * (w.k / 64);
  if (steps >= int64_t{1} << 31 || (!plan.row_warps && plan.grid > steps)) return cudaErrorInvalidValue;
  if (reserves_shared_memory() && device_attribute(cudaDevAttrReservedSharedMemoryPerBlock) != kSharedBase) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
}

MmaArgs build_args(const Nf4Linear& linear, const MmaPlan& plan) {
  const Nf4Weight& w = linear.weight;
  MmaArgs args{};
  args.weight = w;
  args.bias = linear.bias;
  args.residual = linear.residual;
  args.out = linear.out;
  args.counters = linear.counters;
  args.clock = linear.clock;
  args.m = static_cast<int>(linear.m);
  args.n = static_cast<int>(w.n);
  args.k = static_cast<int>(w.k);
  args.k_steps = args.k / 64;
  args.token_tiles = (args.m + plan.tokens - 1) / plan.tokens;
  args.scale_shift = log2_of(w.blocksize / 64);
  args.place_first = w.group_offset << args.scale_shift;
  args.place_pitch = args.k_steps + (w.group_skip << args.scale_shift);
  int rows = tile_rows(plan);
  int tiles = (args.n + rows - 1) / rows * args.token_tiles;
  bool even = plan.grid % tiles == 0;  // then none has parts of two tiles
  args.span = args.k_steps * (even ? 1 : tiles);
  args.parts = even ? plan.grid / tiles : plan.grid;
  args.share = args.span / args.parts;
  args.more = args.span % args.parts;
  args.gate = gate_of(linear);
  return args;
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits the plan. A norm is a launch in front, which
// leaves normalised tokens at the beginning of the workspace.
NF4_EXPORT int nf4_cuda_linear_mma(const Nf4Linear* linear, const MmaPlan* plan) {
  cudaError_t status = nf4::validate(*linear, *plan);
  if (status != cudaSuccess) return status;
  auto stream = static_cast<cudaStream_t>(linear->stream);
  const void* x = linear->x;
  char* workspace = static_cast<char*>(linear->workspace);
  if (linear->norm_weight) {
    status = nf4::launch_norm(*linear, stream);
    if (status != cudaSuccess) return status;
    x = workspace;
    workspace += nf4::norm_bytes(*linear);
  }
  nf4::MmaArgs args = nf4::build_args(*linear, *plan);
  args.x = x;
  args.partials = reinterpret_cast<float4*>(workspace);
  if (plan->row_warps) return nf4::launch_whole(args, *plan, linear->dtype, stream);
  if (nf4::is_wide(*plan)) return nf4::launch_wide(args, linear->dtype, plan->warps, plan->tokens, plan->grid, stream);
#define NF4_INSTANCE(warps_, tiles_)                                                                \
  if (plan->warps == warps_ && plan->tokens == tiles_ * 8) {                                        \
    return nf4::launch_instance<warps_, tiles_>(args, linear->dtype, plan->grid, stream);           \
  }
  NF4_MMA_INSTANCES
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}
