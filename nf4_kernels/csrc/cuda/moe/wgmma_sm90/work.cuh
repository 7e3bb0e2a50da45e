// GEMMs of many choices with experts' NF4 weights on Hopper: linear_wgmma's tiles (../../wgmma_sm90/linear_wgmma.cuh tells
// how one is computed), where each token tile is a group of choices of one expert and multiplies that expert's weight.
//
// One launch lists the groups and orders x, and the GEMM gathers rows of x; or one lists the groups, one gathers x into tiles,
// and the GEMM copies those (prepare.cuh). Where a token's choices are added up, a last launch does that (../sums.cuh). Tiles
// cost one more pass over the choices' activations; a warp that gathers is too slow for many choices. The grid is as large as
// the device, whatever the groups are: a thread block takes every gridDim.x-th tile, and the number of tiles is read on the
// device.
#pragma once

#include "../../wgmma_sm90/consumers.cuh"
#include "../../wgmma_sm90/producers.cuh"
#include "../activation.cuh"
#include "../args.cuh"

namespace nf4 {

// n and weight.n are rows of one expert; gate.columns are rows of its gates, 0 without an activation.
struct MoeWgmmaArgs : WgmmaArgs {
  GroupList list;  // its groups are token tiles
  int row_tiles;
  int activation;
  int x_choices;       // that share a row of x
  unsigned row_bytes;  // of such a row in `tiles`, which are x in the order of k that tiles have
  bool tiled;          // or they are whole tiles of the groups' choices
};

// A thread block's tiles. Neighbouring thread blocks have row tiles of the same token tile.
struct MoeTiles {
  int next, count;
  int group, expert, row;  // row: the tile's first, in the expert
  __device__ __forceinline__ explicit MoeTiles(const MoeWgmmaArgs& args)
      : next(blockIdx.x), count(args.list.count() * args.row_tiles) {}
  template <int kRows>
  __device__ __forceinline__ bool advance(const MoeWgmmaArgs& args) {
    if (next >= count) return false;
    group = next / args.row_tiles;
    row = (next - group * args.row_tiles) * kRows;
    expert = args.list.expert(group);
    next += gridDim.x;
    return true;
  }
};

__device__ __forceinline__ void copy_box(unsigned target, const void* map, int x, int y, int z, int w,
                                         unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

}  // namespace nf4
