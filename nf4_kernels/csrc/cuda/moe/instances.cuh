// The instances of rows.cuh, in tables that are compiled side by side (launches/), and the functions that launch one.
#pragma once

#include "rows_work.cuh"

// NF4_INSTANCE(consumer warps, teams, k blocks of a warp): 16 warps, and fewer for devices whose blocks have 99 KB of shared
// memory. nf4_kernels/plan/moe_rows.py lists the same.
#define NF4_MOE_ROWS_OF_1_TILE \
  NF4_INSTANCE(16, 1, 1)       \
  NF4_INSTANCE(16, 1, 2)       \
  NF4_INSTANCE(16, 1, 3)       \
  NF4_INSTANCE(16, 1, 4)       \
  NF4_INSTANCE(16, 1, 8)       \
  NF4_INSTANCE(16, 2, 2)       \
  NF4_INSTANCE(16, 2, 3)       \
  NF4_INSTANCE(16, 2, 4)       \
  NF4_INSTANCE(16, 4, 2)       \
  NF4_INSTANCE(16, 4, 3)       \
  NF4_INSTANCE(16, 4, 4)       \
  NF4_INSTANCE(8, 1, 1)        \
  NF4_INSTANCE(8, 1, 2)
#define NF4_MOE_ROWS_OF_2_TILES \
  NF4_INSTANCE(16, 1, 1)        \
  NF4_INSTANCE(16, 1, 2)        \
  NF4_INSTANCE(16, 1, 3)        \
  NF4_INSTANCE(16, 1, 4)        \
  NF4_INSTANCE(16, 2, 2)        \
  NF4_INSTANCE(16, 2, 3)        \
  NF4_INSTANCE(4, 1, 2)
#define NF4_MOE_ROWS_OF_4_TILES \
  NF4_INSTANCE(16, 1, 1)        \
  NF4_INSTANCE(16, 1, 2)
// NF4_INSTANCE(consumer warps, teams, k blocks of a warp, token tiles): those whose weights are copied in boxes, on Hopper.
#define NF4_MOE_BOXED_ROWS  \
  NF4_INSTANCE(16, 2, 3, 1) \
  NF4_INSTANCE(16, 1, 4, 1) \
  NF4_INSTANCE(16, 2, 4, 1)

namespace nf4 {

// Each launches the instance with this number of token tiles that the plan names; cudaErrorInvalidValue where there is
// none.
cudaError_t launch_moe_rows_of_1_tile(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan);
cudaError_t launch_moe_rows_of_2_tiles(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan);
cudaError_t launch_moe_rows_of_4_tiles(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan);
cudaError_t launch_boxed_moe_rows(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan);

}  // namespace nf4
