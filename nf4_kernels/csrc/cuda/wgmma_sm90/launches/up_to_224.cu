// The instances of linear_wgmma.cuh with up to 224 tokens a tile.
#include "launch_instance.cuh"

namespace nf4 {
NF4_WGMMA_INSTANCES_UP_TO_224
}  // namespace nf4
