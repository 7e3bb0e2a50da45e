// Which k steps of which tiles a thread block of linear_wgmma.cuh does.
#pragma once

#include "traits.cuh"

namespace nf4 {

// A thread block's consecutive k steps, tile by tile. With stream-K all tiles' k steps are one line, divided over gridDim.x
// thread blocks; with split-K every tile is a line of its own, divided likewise, and gridDim.y is the number of tiles.
struct TileScheduler {
  int next, last;
  int tile, first_step, steps;
  // Thread blocks are started in the order of their indices, so the line is dealt out from its end: see split_tiles.cuh.
  __device__ static int line() { return gridDim.y - 1 - blockIdx.y; }
  __device__ static int index() { return gridDim.x - 1 - blockIdx.x; }
  __device__ static int start(const WgmmaArgs& args, int index) {
    return line() * args.steps + index * args.block_steps + min(index, args.longer_blocks) +
           (index > 0 ? args.first_extra : 0);
  }
  __device__ explicit TileScheduler(const WgmmaArgs& args)
      : next(start(args, index())), last(start(args, index() + 1)) {}
  // Goes on to this thread block's k steps of the next tile; false where none are left.
  __device__ __forceinline__ bool advance(const WgmmaArgs& args) {
    if (next >= last) return false;
    tile = next / args.steps;
    first_step = next - tile * args.steps;
    steps = min(args.steps - first_step, last - next);
    next += steps;
    return true;
  }
};

}  // namespace nf4
