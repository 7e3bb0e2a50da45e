// The C entry of linear_rows.cuh: picks the instance that a plan names and launches it.
#include "linear_rows.cuh"

namespace nf4 {
namespace {

// What the system keeps at the start of a block's shared memory on the current device; -1 where CUDA does not say.
int reserved_shared_bytes() {
  int device = 0, bytes = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return -1;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrReservedSharedMemoryPerBlock, device) != cudaSuccess) return -1;
  return bytes;
}

template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested>
cudaError_t launch(const RowsArgs& args, int grid, cudaStream_t stream) {
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  if (args.stages < 1 || args.stages > Layout::kStageLimit) return cudaErrorInvalidValue;
  auto* kernel = linear_rows<T, kWarps, kBlocks, kTiles, kNested>;
  int shared = Layout::total(args.stages);
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  kernel<<<grid, (kWarps + kServiceWarps<kWarps, kTiles>) * 32, shared, stream>>>(args);
  return cudaGetLastError();
}

template <int kWarps, int kBlocks, int kTiles>
cudaError_t launch(const RowsArgs& args, int dtype, int grid, cudaStream_t stream) {
  bool nested = args.weight.absmax_8bit != nullptr;
#ifndef NF4_BF16_ONLY
  if (dtype == NF4_FLOAT16) {
    return nested ? launch<__half, kWarps, kBlocks, kTiles, true>(args, grid, stream)
                  : launch<__half, kWarps, kBlocks, kTiles, false>(args, grid, stream);
  }
#endif
  return nested ? launch<__nv_bfloat16, kWarps, kBlocks, kTiles, true>(args, grid, stream)
                : launch<__nv_bfloat16, kWarps, kBlocks, kTiles, false>(args, grid, stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits the plan.
NF4_EXPORT int nf4_cuda_linear_rows(const Nf4Linear* linear, const RowsPlan* plan) {
  const Nf4Weight& w = linear->weight;
  if (w.k % 64 || w.blocksize < 64 || linear->dtype == NF4_FLOAT32) return cudaErrorInvalidValue;
  if (linear->m > plan->tiles * 8 || plan->blocks * plan->warps < plan->part_blocks) return cudaErrorInvalidValue;
  if (nf4::reserved_shared_bytes() != nf4::kSharedBase) return cudaErrorNotSupported;
  nf4::RowsArgs args{};
  args.weight = w;
  args.x = linear->x;
  args.bias = linear->bias;
  args.out = linear->out;
  args.partial = static_cast<float4*>(linear->workspace);
  args.counters = linear->counters;
  args.m = static_cast<int>(linear->m);
  args.n = static_cast<int>(w.n);
  args.k = static_cast<int>(w.k);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.scale_shift = nf4::log2_of(w.blocksize / 64);
  args.groups = (args.n + nf4::kGroupRows - 1) / nf4::kGroupRows;
  args.parts = plan->parts;
  args.part_blocks = plan->part_blocks;
  args.stages = plan->stages;
  args.units_per_block = args.groups * args.parts / plan->grid;
  args.blocks_with_more = args.groups * args.parts % plan->grid;
  cudaStream_t stream = static_cast<cudaStream_t>(linear->stream);
// nf4_kernels/plan.py lists the same instances.
#define NF4_INSTANCE(WARPS, BLOCKS, TILES)                                                 \
  if (plan->warps == WARPS && plan->blocks == BLOCKS && plan->tiles == TILES) {            \
    return nf4::launch<WARPS, BLOCKS, TILES>(args, linear->dtype, plan->grid, stream);     \
  }
  NF4_INSTANCE(16, 1, 1)
  NF4_INSTANCE(16, 2, 1)
  NF4_INSTANCE(16, 3, 1)
  NF4_INSTANCE(16, 4, 1)
  NF4_INSTANCE(16, 5, 1)
  NF4_INSTANCE(16, 6, 1)
  NF4_INSTANCE(16, 7, 1)
  NF4_INSTANCE(16, 8, 1)
  NF4_INSTANCE(14, 6, 1)
  NF4_INSTANCE(16, 1, 2)
  NF4_INSTANCE(16, 2, 2)
  NF4_INSTANCE(16, 3, 2)
  NF4_INSTANCE(16, 4, 2)
  NF4_INSTANCE(14, 6, 2)
  NF4_INSTANCE(16, 1, 4)
  NF4_INSTANCE(16, 2, 4)
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}
