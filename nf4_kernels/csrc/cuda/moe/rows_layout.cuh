// The shared memory of rows.cuh.
#pragma once

#include "../rows/layout.cuh"

namespace nf4 {

// The layout of dynamic shared memory. It is that of linear_rows (../rows/layout.cuh), where a stage holds kTeams units, each of
// which has a team of consumer warps to itself.
// kBoxed: a unit's codes are one tensor copy's, [256 k][16 rows][128 bytes], whose 16-byte chunks the copy engine swaps by rows;
// the warps that decode scales, of which each team has its own, load them themselves; and two warps reduce.
template <int kConsumers, int kTeams_, int kBlocks, int kTiles, bool kNested, bool kBoxed_ = false>
struct MoeLayout {
  static constexpr bool kBoxed = kBoxed_;
  static constexpr int kWarps = kConsumers, kTeams = kTeams_, kTeamWarps = kWarps / kTeams;
  static constexpr int kTeamDecoders = kTeams > 1 ? 1 : 2;
  static constexpr int kReducers = kBoxed ? 2 : 1, kDecoders = kBoxed ? kTeamDecoders * kTeams : 2;
  // Arrivals of a warp at a barrier: with boxes one lane's for all.
  static constexpr int kWarpArrivals = kBoxed ? 1 : 32;
  static constexpr int kServiceWarps = 1 + kReducers + kDecoders;
  static constexpr int kThreads = (kWarps + kServiceWarps) * 32;
  static constexpr int kUnitBlocks = kTeamWarps * kBlocks;  // 64-wide k blocks of a unit
  static constexpr int kStageBlocks = kTeams * kUnitBlocks;
  static_assert(kUnitBlocks % 4 == 0, "a run of four scales would end in the next unit's slots");
  static constexpr int kWeightPitch = kUnitBlocks * 32 + 32;
  static constexpr int kScalePitch = ((kUnitBlocks * (kNested ? 1 : 4) + 15 + 15) / 16 | 1) * 16;
  static constexpr int kCodeBytes = kBoxed ? kUnitBlocks * 512 : kGroupRows * kWeightPitch;
  static constexpr int kScaleBytes = kBoxed ? 0 : kGroupRows * kScalePitch;
  static constexpr int kUnitBytes = kCodeBytes + kScaleBytes;
  static constexpr int kStageBytes = kTeams * kUnitBytes;
  static constexpr int kCode = kTableBytes;
  static constexpr int kSums = kCode + 1024;
  static constexpr int kBarriers = kSums + 2 * kWarps * kTiles * 512;
  static constexpr int kStageSlots = kMaxStages + 1, kBarrierCount = 3 * kStageSlots + 8;
  static constexpr int kColumns = kBarriers + kBarrierCount * 8;  // [16 rows][kTiles * 8] results that wait to be added up
  static constexpr int kRingAlignment = kBoxed ? 1024 : 128;
  static constexpr int kRing =
      (kColumns + kGroupRows * kTiles * 32 + kRingAlignment - 1) / kRingAlignment * kRingAlignment;
  static constexpr int kDecodedStage = kStageBlocks / 2 * kTableStride;
  static constexpr int kSlots = kTableBytes / kDecodedStage;
  static constexpr int kStageLimit = kSlots < kMaxStages ? kSlots : kMaxStages;

  __host__ __device__ static constexpr int total(int stages) { return kRing + stages * kStageBytes; }
  // Byte offset of a unit's codes in the ring; its scales lie behind them.
  __device__ static int codes(int stage, int team) { return kRing + stage * kStageBytes + team * kUnitBytes; }
  // The weight row, of the unit's upper 8 (and of its lower 8), that lane group g of a warp multiplies. The half warps of a
  // read take every other row of a box: so their chunks lie in different banks.
  __device__ static int row_of(int g) { return !kBoxed ? g : g < 4 ? 2 * g : 2 * g - 7; }
  __device__ static unsigned barrier(unsigned base, int index) { return base + kBarriers + index * 8; }
  __device__ static unsigned full(unsigned base, int stage) { return barrier(base, stage); }
  __device__ static unsigned decoded(unsigned base, int stage) { return barrier(base, kStageSlots + stage); }
  __device__ static unsigned empty(unsigned base, int stage) { return barrier(base, 2 * kStageSlots + stage); }
  __device__ static unsigned sums_full(unsigned base, int i) { return barrier(base, 3 * kStageSlots + i); }
  __device__ static unsigned sums_empty(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 2 + i); }
  // The clusters' barriers and the activations' of linear_rows, which are set up with the others and unused.
  __device__ static unsigned partials_full(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 4 + i); }
  __device__ static unsigned partials_free(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 6 + i); }
  __device__ static unsigned activations(unsigned base) { return barrier(base, 2 * kStageSlots - 1); }
  // Byte offset of the decoded scales [row % 8][row / 8] of one k block of a stage.
  __device__ static int scale_slot(int stage, int block) {
    return stage * kDecodedStage + (block >> 1) * kTableStride + 128 + (block & 1) * 64;
  }
  // What the decoding of one unit's scales is told.
  struct Unit {
    static constexpr int kStageBlocks = kUnitBlocks, kDecoders = 2;
  };
};

}  // namespace nf4
