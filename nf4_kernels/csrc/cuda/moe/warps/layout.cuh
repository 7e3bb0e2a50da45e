// What moe_warps (kernel.cuh) is told, its shared memory, and a warp's units.
#pragma once

#include "../../rows/layout.cuh"
#include "../args.cuh"
#include "../groups.cuh"

namespace nf4 {

constexpr int kStepBlocks = 4;  // 64-wide k blocks of a step, whose codes are 128 bytes of a row
constexpr int kMostSteps = 4;   // a row's four lanes have the scales of a step each

struct MoeWarpsArgs {
  Nf4Weight weight;  // of one expert; those of the others lie behind it
  const void* x;
  const int* experts;
  const void* bias;
  const float* routing;
  void* out;
  float* partial;  // null, or [choices][n]: results that a launch behind adds up, by their routing weights
  int choices, num_experts, top_k, tokens;
  int x_choices;  // that share a row of x
  int n;          // rows of an expert
  int k, k_blocks;
  int steps;       // of a unit
  int row_groups;  // units of a group of choices
  int held_groups;
  bool adds;  // a thread block has some row groups of all groups, and adds up their choices itself
  bool follows_gated;  // see Nf4Moe
};

// Dynamic shared memory: the table of linear_rows; the codes of nested scales; a ring of stages for each warp; the groups;
// routing weights and results that are added up. kWhole: whether k is whole steps.
template <int kWarps_, int kRowTiles_, bool kNested_, bool kWhole_>
struct MoeWarpsLayout {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kStages = 4;
  static constexpr int kRowTiles = kRowTiles_, kRows = kRowTiles * 16;  // of a unit
  static constexpr int kSize = 8;                                       // choices of a group
  static constexpr bool kNested = kNested_, kWhole = kWhole_;
  static constexpr int kStageBytes = kRows * 128, kWarpBytes = kStages * kStageBytes;
  static constexpr int kCode = kTableBytes, kRing = kCode + 1024, kHeld = kRing + kWarps * kWarpBytes;
};

// A warp's units: every kWarps-th of its thread block's. These are consecutive in the order group, row group; or where the
// block adds up choices, they are those of some row groups, in the order row group, group.
struct WarpUnits {
  int left, outer, inner, most, warps;
  bool adds;
  __device__ __forceinline__ WarpUnits(const MoeWarpsArgs& args, int groups, int warps) : warps(warps), adds(args.adds) {
    Share share(adds ? 1 : groups, args.row_groups);
    int warp = threadIdx.x / 32, units = adds ? share.count * groups : share.count;
    left = (units - warp + warps - 1) / warps;
    outer = adds ? share.first : 0;
    inner = warp + (adds ? 0 : share.first % args.row_groups);
    most = adds ? groups : args.row_groups;
    if (left > 0) wrap();
  }
  __device__ __forceinline__ int at() const { return adds ? inner : outer; }  // the group's place among the held ones
  __device__ __forceinline__ int row_group() const { return adds ? outer : inner; }
  __device__ __forceinline__ void wrap() {
    while (inner >= most) {
      inner -= most;
      ++outer;
    }
  }
  __device__ __forceinline__ void next() {
    --left;
    inner += warps;
    wrap();
  }
};

}  // namespace nf4
