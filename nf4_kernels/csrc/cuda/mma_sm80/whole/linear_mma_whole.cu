// Fills the rest of linear_mma_whole.cuh's arguments and launches the instance that the plan names.
#include "launch.cuh"
#include "linear_mma_whole.cuh"

namespace nf4 {
namespace {

template <typename T, typename Shape>
cudaError_t launch_instance(WholeArgs args, int grid, cudaStream_t stream) {
  int warps = args.row_warps * args.k_warps + args.loaders, step_blocks = args.k_warps * kStepBlocks;
  if (warps > Shape::kWarps || args.k_warps > Shape::kMaxKWarps) return cudaErrorInvalidValue;
  int rows = args.row_warps * Shape::kRowTiles * 16;
  args.steps = (args.k_steps + step_blocks - 1) / step_blocks;
  args.tiles = (args.n + rows - 1) / rows * args.token_tiles;
  args.tiles_of_block = (args.tiles + grid - 1) / grid;
  if (grid != (args.tiles + args.tiles_of_block - 1) / args.tiles_of_block) return cudaErrorInvalidValue;
  auto* kernel = linear_mma_whole<T, Shape>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kTotal);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(warps * 32), Shape::kTotal, stream>>>(args);
  return cudaGetLastError();
}

template <typename Shape>
cudaError_t launch_instance(const WholeArgs& args, int dtype, int grid, cudaStream_t stream) {
#ifndef NF4_BF16_ONLY
  if (dtype == NF4_FLOAT16) return launch_instance<__half, Shape>(args, grid, stream);
#endif
  return launch_instance<__nv_bfloat16, Shape>(args, grid, stream);
}

}  // namespace

cudaError_t launch_whole(const MmaArgs& shared, const MmaPlan& plan, int dtype, cudaStream_t stream) {
  bool loads = plan.loaders == 1 || plan.loaders == 2 || plan.loaders == 4;
  if (plan.row_warps < 1 || plan.k_warps < 1 || !loads) return cudaErrorInvalidValue;
  WholeArgs args{shared};
  args.row_warps = plan.row_warps;
  args.k_warps = plan.k_warps;
  args.loaders = plan.loaders;
#define NF4_INSTANCE(warps_, row_tiles_, tiles_, chunk_)                                                    \
  if (plan.warps == warps_ && plan.tokens == tiles_ * 8) {                                                  \
    return launch_instance<WholeShape<warps_, row_tiles_, tiles_, chunk_>>(args, dtype, plan.grid, stream); \
  }
  // nf4_kernels/plan/mma.py lists the same.
  NF4_INSTANCE(16, 1, 1, 2)
  NF4_INSTANCE(15, 2, 1, 2)
  NF4_INSTANCE(16, 1, 2, 1)
  NF4_INSTANCE(12, 2, 2, 2)
  NF4_INSTANCE(16, 1, 3, 1)
  NF4_INSTANCE(8, 2, 3, 1)
  NF4_INSTANCE(16, 1, 4, 1)
  NF4_INSTANCE(8, 2, 4, 1)
  NF4_INSTANCE(16, 1, 6, 1)
  NF4_INSTANCE(8, 2, 6, 1)
  NF4_INSTANCE(16, 1, 8, 1)
  NF4_INSTANCE(8, 2, 8, 1)
  NF4_INSTANCE(8, 2, 10, 1)
  NF4_INSTANCE(8, 2, 12, 1)
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace nf4
