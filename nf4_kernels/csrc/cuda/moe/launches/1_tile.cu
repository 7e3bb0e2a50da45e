// The instances of rows.cuh with 1 token tile.
#include "launch_instance.cuh"

cudaError_t nf4::launch_moe_rows_of_1_tile(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  constexpr int kTiles = 1;
  NF4_MOE_ROWS_OF_1_TILE
  return cudaErrorInvalidValue;
}
