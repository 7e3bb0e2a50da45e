// GEMM of tens to hundreds of tokens with an NF4 weight on Hopper: the weight is read once and decoded straight into the
// register operand of wgmma; weight rows are wgmma's m, tokens are its n.
//
// There are two launches. tile_activations.cuh's copies the activations into tiles of shared memory's layout (64 k x
// kTokens, swizzled, k in the order below); it is left out where x comes in tiles. The second one starts while the first
// still runs (programmatic dependent launch) and waits for it only where it reads the tiles. In the second every SM holds
// one thread block, which is warp-specialized: kGroups consumer warpgroups, with 64 weight rows each, and four producer
// warps.
//   load weights    one tensor copy (TMA) a k step: 256 k of kGroups * 64 rows, which are 128 bytes a row
//   load tokens     bulk copies of tiled activations
//   load scales     two warps store them as floats; they decode nested ones
//   consume         A byte is two neighbouring k of a row, which is one A register. A table of 256 entries (in 32 copies,
//                   one for each bank, so that no lookup conflicts) turns bytes into registers while the tensor cores are
//                   busy with the 64 k before. The sums of each 64 k are multiplied by their scales in float32 as they are
//                   added up. A tile of more than 128 tokens leaves no registers for such sums: its weights are scaled
//                   before they are rounded, and the tensor cores add up all k.
// Work is divided by stream-K or by split-K (scheduler.cuh). A split tile's partial sums go through the workspace, and the
// thread block that has its first k step reduces them in the order of k (split_tiles.cuh): results do not depend on timing.
//
// Order of k: of each 64 k, lane t of a quad takes 16t..16t+15, which are eight contiguous bytes; byte i is A column 8i + 2t
// of wgmma. So column chunk i (8 columns, 16 bytes) of a token holds its 4-byte words i, 8 + i, 16 + i and 24 + i.
// Order of rows: rows 2g and 2g + 1 of 16 are A rows g and g + 8. A lane so writes two neighbours of the output at once, and
// its 8-byte reads of the swizzled stage do not conflict.
#pragma once

#include "consumers.cuh"
#include "producers.cuh"
#include "tile_activations.cuh"

namespace nf4 {

// kTimed: one warpgroup times its decoding. It is a kernel of its own, since a second loop beside the first,
// though no warp enters it, makes the first one up to 15 % slower.
template <typename Traits, bool kTimed>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    linear_wgmma(const __grid_constant__ WgmmaArgs args, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  WgmmaLayout<Traits> layout{shared_address(shared)};
  if (layout.base != kTableBase) __trap();
  launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == Traits::kConsumerWarps && lane == 0) prefetch_map(&map);
  if (threadIdx.x == 0) layout.init_barriers();
  __syncthreads();
  if (warp >= Traits::kConsumerWarps) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    produce<Traits>(args, &map, layout, shared);
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    // Meanwhile the first stages are on their way.
    fill_table<Traits>(shared, warp);
    barrier_sync(kTableBarrier, Traits::kConsumers);
    if (kTimed && blockIdx.x + blockIdx.y == 0 && warp < 4) {
      consume<Traits, true>(args, shared);
    } else {
      consume<Traits, false>(args, shared);
    }
  }
#endif
}

}  // namespace nf4
