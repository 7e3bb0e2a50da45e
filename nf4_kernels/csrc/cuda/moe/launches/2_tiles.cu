// The instances of rows.cuh with 2 token tiles.
#include "launch_instance.cuh"

cudaError_t nf4::launch_moe_rows_of_2_tiles(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  constexpr int kTiles = 2;
  NF4_MOE_ROWS_OF_2_TILES
  return cudaErrorInvalidValue;
}
