// The instances of work.cuh with up to 32 choices a tile.
#include "launch_instance.cuh"

namespace nf4 {
NF4_MOE_INSTANCES_UP_TO_32
}  // namespace nf4
