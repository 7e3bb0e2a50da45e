// The instances of work.cuh and the function that launches one; launches/ compiles them side by side.
#pragma once

#include "../../wgmma_sm90/traits.cuh"
#include "work.cuh"

// As in ../../wgmma_sm90/instances.cuh, where the reasons are. nf4_kernels/plan/moe.py lists the same tokens and warpgroups.
#define NF4_MOE_INSTANCES_UP_TO_32                       \
  NF4_INSTANCE(16, 2, 5, 5, kDoubleBufferedSums, false) \
  NF4_INSTANCE(32, 2, 5, 4, kDoubleBufferedSums, false)
#define NF4_MOE_INSTANCES_UP_TO_128                      \
  NF4_INSTANCE(64, 2, 4, 5, kDoubleBufferedSums, false) \
  NF4_INSTANCE(128, 2, 4, 5, kSums, true)
#define NF4_MOE_INSTANCES_UP_TO_256 NF4_INSTANCE(256, 2, 3, 3, kWeights, false)
#define NF4_MOE_INSTANCES     \
  NF4_MOE_INSTANCES_UP_TO_32  \
  NF4_MOE_INSTANCES_UP_TO_128 \
  NF4_MOE_INSTANCES_UP_TO_256

namespace nf4 {

template <typename Instance>
cudaError_t launch_moe_instance(const Nf4Moe& moe, const MoeWgmmaArgs& args, const CUtensorMap& map, int grid);

}  // namespace nf4
