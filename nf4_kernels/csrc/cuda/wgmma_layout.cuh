// What the stages of linear_wgmma.cuh share: arguments, the shared memory's layout, rings, a block's run of work.
#pragma once

#include <cuda.h>

#include "clock.cuh"
#include "common.cuh"
#include "gate.cuh"
#include "wgmma.cuh"

namespace nf4 {

// Where dynamic shared memory, and in it the table, starts: as a constant it goes into the lookups' immediate offsets.
// The kernel checks it.
constexpr int kTableBase = 1024;

struct WgmmaArgs {
  Nf4Weight weight;
  const void* bias;
  const void* residual;
  void* out;
  const char* tiles;  // arranged activations
  bool begins;        // no launch of the product's is in front of this one
  float4* partial;
  int* counters;
  int m, n;
  int k_blocks;     // k / 64
  int scale_shift;  // log2(blocksize / 64)
  int steps;        // of 256 k a tile
  int token_tiles;
  int run_units, longer_runs;  // units of a run; so many runs, the first, have one more
  int owner_units;             // what the first run has beyond that
  bool whole_scales;  // four k blocks' scales of a row are four aligned neighbours
  bool wide_scales;   // and 16 are 16 aligned bytes
  uint64_t* clock;
  Gate gate;

  // The weight's row that a row of the product is: where a launch gates, gates and ups take turns.
  template <bool kGates>
  __device__ __forceinline__ int weight_row(int row) const {
    return kGates ? row / 2 + row % 2 * gate.columns : row;
  }
};

template <int kTokens, int kGroups, int kStages, int kTokenStages>
struct WgmmaLayout {
  static constexpr int kRows = kGroups * 64;
  static constexpr int kTableStride = 256;  // a byte permute makes an entry's offset; the second 128 bytes are free
  static constexpr int kTokenBlocks = kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;  // 64-wide k blocks a token stage
  static constexpr bool kSlow = kTokens == 256;  // a stage takes longer than its scales' way, and registers are short
  static constexpr int kWeightBytes = kRows * 128;
  static constexpr int kTokenBytes = kTokenBlocks * kTokens * 128;
  static constexpr int kScaleBytes = 4 * kRows * 4;
  static constexpr int kWeights = 256 * kTableStride;
  static constexpr int kActivations = kWeights + kStages * kWeightBytes;
  static constexpr int kScales = kActivations + kTokenStages * kTokenBytes;
  static constexpr int kCode = kScales + kStages * kScaleBytes;
  static constexpr int kBarriers = kCode + 1024;
  static constexpr int kTotal = kBarriers + (3 * kStages + 3 * kTokenStages) * 8;
  static_assert(kTotal <= 227 * 1024, "more shared memory than an SM has");

  unsigned base;
  __device__ unsigned weights(int stage) const { return base + kWeights + stage * kWeightBytes; }
  __device__ unsigned tokens(int stage) const { return base + kActivations + stage * kTokenBytes; }
  __device__ unsigned weights_full(int stage) const { return base + kBarriers + stage * 8; }
  __device__ unsigned scales_full(int stage) const { return base + kBarriers + (kStages + stage) * 8; }
  __device__ unsigned weights_empty(int stage) const { return base + kBarriers + (2 * kStages + stage) * 8; }
  __device__ unsigned tokens_full(int stage) const { return base + kBarriers + (3 * kStages + stage) * 8; }
  __device__ unsigned tokens_empty(int stage) const {
    return base + kBarriers + (3 * kStages + kTokenStages + stage) * 8;
  }
  // Of a token stage that has held sums: unlike tokens, all threads read them.
  __device__ unsigned sums_empty(int stage) const {
    return base + kBarriers + (3 * kStages + 2 * kTokenStages + stage) * 8;
  }
};

template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A block's run of units, taken tile by tile. Either all units are one line, cut into gridDim.x runs, or every tile is
// one, cut likewise, and gridDim.y is the number of tiles.
struct WgmmaRun {
  int next, last;
  int tile, first_step, steps;
  __device__ static int line() { return gridDim.y - 1 - blockIdx.y; }
  __device__ static int index() { return gridDim.x - 1 - blockIdx.x; }
  __device__ static int start(const WgmmaArgs& args, int run) {
    return line() * args.steps + run * args.run_units + min(run, args.longer_runs) + (run > 0 ? args.owner_units : 0);
  }
  __device__ explicit WgmmaRun(const WgmmaArgs& args) : next(start(args, index())), last(start(args, index() + 1)) {}
  __device__ __forceinline__ bool take(const WgmmaArgs& args) {
    if (next >= last) return false;
    tile = next / args.steps;
    first_step = next - tile * args.steps;
    steps = min(args.steps - first_step, last - next);
    next += steps;
    return true;
  }
};

}  // namespace nf4
