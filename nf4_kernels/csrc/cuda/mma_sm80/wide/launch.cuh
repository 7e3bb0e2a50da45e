// The launch of linear_mma_wide.cuh, for the C entry in linear_mma.cu.
#pragma once

#include "../layout.cuh"

namespace nf4 {

// Tiles of so many tokens and more are those of linear_mma_wide.cuh.
constexpr int kWideTokens = 80;

// Multiplies in tiles of 64 rows for each of row_tiles. Thread blocks of split tiles wait for one another, so all of them must
// run at the same time.
cudaError_t launch_wide(const MmaArgs& args, int dtype, int row_tiles, int tokens, int grid, cudaStream_t stream);

}  // namespace nf4
