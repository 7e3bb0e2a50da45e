// The instances of work.cuh with up to 128 choices a tile.
#include "launch_instance.cuh"

namespace nf4 {
NF4_MOE_INSTANCES_UP_TO_128
}  // namespace nf4
