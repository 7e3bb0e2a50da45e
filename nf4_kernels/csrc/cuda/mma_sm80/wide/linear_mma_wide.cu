// Launches the instance of linear_mma_wide.cuh that the plan names.
#include "launch.cuh"
#include "../launch.cuh"
#include "linear_mma_wide.cuh"

namespace nf4 {
namespace {

template <typename T, typename Shape>
cudaError_t launch_instance(const MmaArgs& args, int grid, cudaStream_t stream) {
  int tiles = (args.n + Shape::kRows - 1) / Shape::kRows * args.token_tiles;
  if (grid != tiles * args.parts || args.share < 1) return cudaErrorInvalidValue;
  return launch_blocks(linear_mma_wide<T, Shape>, args, grid, Shape::kThreads, Shape::kTotal, args.parts > 1, stream);
}

template <typename Shape>
cudaError_t launch_instance(const MmaArgs& args, int dtype, int grid, cudaStream_t stream) {
#ifndef NF4_BF16_ONLY
  if (dtype == NF4_FLOAT16) return launch_instance<__half, Shape>(args, grid, stream);
#endif
  return launch_instance<__nv_bfloat16, Shape>(args, grid, stream);
}

}  // namespace

cudaError_t launch_wide(const MmaArgs& args, int dtype, int row_tiles, int tokens, int grid, cudaStream_t stream) {
#define NF4_INSTANCE(row_tiles_, tiles_)                                                    \
  if (row_tiles == row_tiles_ && tokens == WideShape<row_tiles_, tiles_>::kTokens) {        \
    return launch_instance<WideShape<row_tiles_, tiles_>>(args, dtype, grid, stream);       \
  }
  // nf4_kernels/plan/mma_wide.py lists the same.
  NF4_INSTANCE(4, 5)
  NF4_INSTANCE(4, 6)
  NF4_INSTANCE(4, 7)
  NF4_INSTANCE(4, 8)
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace nf4
