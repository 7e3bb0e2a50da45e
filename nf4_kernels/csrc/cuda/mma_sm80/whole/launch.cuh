// The launch of linear_mma_whole.cuh, for the C entry in linear_mma.cu.
#pragma once

#include "../../common.cuh"

namespace nf4 {

// Multiplies x, which a norm's launch may have normalised, in tiles of so many tokens and of 16 rows for each of row_warps.
cudaError_t launch_whole(const Nf4Linear& linear, const void* x, int tokens, int row_warps, int grid);

}  // namespace nf4
