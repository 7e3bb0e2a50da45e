// The instances of rows.cuh with 4 token tiles.
#include "launch_instance.cuh"

cudaError_t nf4::launch_moe_rows_of_4_tiles(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  constexpr int kTiles = 4;
  NF4_MOE_ROWS_OF_4_TILES
  return cudaErrorInvalidValue;
}
