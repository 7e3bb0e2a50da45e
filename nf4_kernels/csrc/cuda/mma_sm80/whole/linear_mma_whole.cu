// Fills linear_mma_whole.cuh's arguments and launches the instance that the plan names.
#include "../../device.cuh"
#include "launch.cuh"
#include "linear_mma_whole.cuh"

namespace nf4 {
namespace {

template <typename T, typename Shape>
cudaError_t launch_instance(WholeArgs args, int grid, cudaStream_t stream) {
  if (args.row_warps > Shape::kWarps) return cudaErrorInvalidValue;
  args.k_warps = Shape::k_warps(args.row_warps, args.k_blocks);
  int threads = (args.row_warps * args.k_warps + 1) * 32, step_blocks = args.k_warps * kStepBlocks;
  int rows = args.row_warps * Shape::kRowTiles * 16;
  args.steps = (args.k_blocks + step_blocks - 1) / step_blocks;
  args.token_tiles = (args.m + Shape::kTokens - 1) / Shape::kTokens;
  args.tiles = (args.n + rows - 1) / rows * args.token_tiles;
  args.tiles_of_block = (args.tiles + grid - 1) / grid;
  if (grid != (args.tiles + args.tiles_of_block - 1) / args.tiles_of_block) return cudaErrorInvalidValue;
  auto* kernel = linear_mma_whole<T, Shape>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kTotal);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(threads), Shape::kTotal, stream>>>(args);
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

cudaError_t launch_whole(const Nf4Linear& linear, const void* x, int tokens, int row_warps, int grid) {
  const Nf4Weight& w = linear.weight;
  if (row_warps < 1) return cudaErrorInvalidValue;
  WholeArgs args{};
  args.weight = w;
  args.x = x;
  args.bias = linear.bias;
  args.residual = linear.residual;
  args.out = linear.out;
  args.clock = linear.clock;
  args.m = static_cast<int>(linear.m);
  args.n = static_cast<int>(w.n);
  args.k = static_cast<int>(w.k);
  args.k_blocks = args.k / 64;
  args.scale_shift = log2_of(w.blocksize / 64);
  args.place_first = w.group_offset << args.scale_shift;
  args.place_pitch = args.k_blocks + (w.group_skip << args.scale_shift);
  args.row_warps = row_warps;
  args.gate = gate_of(linear);
  auto stream = static_cast<cudaStream_t>(linear.stream);
#define NF4_INSTANCE(warps_, row_tiles_, tiles_, chunk_)                                                          \
  if (tokens == tiles_ * 8) {                                                                                     \
    return launch_instance<WholeShape<warps_, row_tiles_, tiles_, chunk_>>(args, linear.dtype, grid, stream);     \
  }
  // nf4_kernels/plan/mma.py lists the same.
  NF4_INSTANCE(15, 1, 1, 2)
  NF4_INSTANCE(15, 1, 2, 2)
  NF4_INSTANCE(15, 1, 3, 1)
  NF4_INSTANCE(15, 1, 4, 1)
  NF4_INSTANCE(7, 2, 6, 1)
  NF4_INSTANCE(7, 2, 8, 1)
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace nf4
