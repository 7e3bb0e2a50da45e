// The launch of linear_mma_whole.cuh, for the C entry in linear_mma.cu.
#pragma once

#include "../layout.cuh"

namespace nf4 {

// Multiplies in whole tiles, by arguments whose shares of thread blocks are those of split tiles.
cudaError_t launch_whole(const MmaArgs& shared, const MmaPlan& plan, int dtype, cudaStream_t stream);

}  // namespace nf4
