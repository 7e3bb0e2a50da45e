// What the parts of linear_mma_whole.cuh share: arguments and the layout of shared memory.
#pragma once

#include "../../gate.cuh"
#include "../../mma.cuh"
#include "../../pipeline.cuh"
#include "../table.cuh"

namespace nf4 {

// A step is so many k blocks (64 k) of each k warp: 128 bytes of a row.
constexpr int kStepBlocks = 4;
// Chunks of activations lie in turn in four quarters of a ring: in the second halves of the table's entries and behind the table,
// 256 bytes from slot to slot. A slot is 64 k of a token.
constexpr unsigned kRing = 4;
constexpr int kRingSlots = 512, kQuarterSlots = kRingSlots / 4;

struct WholeArgs {
  Nf4Weight weight;
  const void* x;
  const void* bias;
  const void* residual;
  void* out;
  uint64_t* clock;
  int m, n, k;
  int k_blocks;     // k / 64
  int token_tiles;  // neighbours in the order of tiles, so that a weight row is read by all of them at about the same time
  int scale_shift;  // log2(blocksize / 64)
  // Where k blocks lie in the groups of 256 nested scales, which in a shard are the whole weight's: the first one of all, and
  // how far one row's lie behind those of the row before.
  int place_first, place_pitch;
  // Of the thread block's consumer warps row_warps have rows of their own, and for each of these rows k_warps share k.
  int row_warps, k_warps;
  int steps;                 // of a tile
  int tiles, tiles_of_block;  // tiles in order: thread block b has those from b * tiles_of_block on
  Gate gate;

  // A row of m16 tile `tile` of all, or the weight's last row. Where the epilogue gates, the lower half of a tile's rows are
  // gates and the upper one their ups, so that a thread has both.
  __device__ __forceinline__ int row_within(int tile, int r) const {
    return min(gate.columns ? tile * 8 + r % 8 + r / 8 * gate.columns : tile * 16 + r, n - 1);
  }
};

// An instance: at most so many consumer warps, each with kRowTiles m16 tiles and kTiles token tiles of 8 tokens; behind them a
// producer warp. Activations come in chunks of kChunk k blocks of each k warp. Dynamic shared memory:
//   the table (rows/layout.cuh): 256 entries, 256 bytes apart, each with 32 copies in its first 128 bytes
//   the ring of activations; also the sums that k warps hand over
//   the code of nested scales
template <int kWarps_, int kRowTiles_, int kTiles_, int kChunk_>
struct WholeShape {
  static constexpr int kWarps = kWarps_, kRowTiles = kRowTiles_, kTiles = kTiles_, kChunk = kChunk_, kTokens = kTiles * 8;
  static constexpr int kThreads = (kWarps + 1) * 32, kRows = kRowTiles * 2, kStepChunks = kStepBlocks / kChunk;
  // Token tiles that are multiplied at the same time: so many sums do not wait for one another.
  static constexpr int kGroup = kTiles < 4 ? kTiles : kRowTiles == 2 || kTiles == 6 ? 2 : 4;
  static constexpr int kScaleCode = kTableBytes + kQuarterSlots * kTableStride;
  static constexpr int kBarriers = kScaleCode + 1024;
  static constexpr int kTotal = kBarriers + 2 * kRing * 8;
  static constexpr int kMostKWarps = kQuarterSlots / (kChunk * kTokens);
  static_assert(kTotal <= 99 << 10 && kMostKWarps > 0 && kChunk <= 2, "");
  static_assert((kWarps - kWarps / kMostKWarps) * kRowTiles * kTiles * 4 <= kRingSlots, "");
  // As many as there is room for, in threads and in a quarter of the ring; of these as few as take no more steps.
  static int k_warps(int row_warps, int k_blocks) {
    int warps = kWarps / row_warps, most = warps < kMostKWarps ? warps : kMostKWarps;
    int steps = (k_blocks + most * kStepBlocks - 1) / (most * kStepBlocks);
    return (k_blocks + steps * kStepBlocks - 1) / (steps * kStepBlocks);
  }
  // The quarter of a step's j-th chunk, and the parity of its barriers' phases that end with it.
  __device__ __forceinline__ static unsigned quarter(unsigned step, int j) { return kChunk == 1 ? j : step % 2 * 2 + j; }
  __device__ __forceinline__ static unsigned parity(unsigned step) { return kChunk == 1 ? step % 2 : step / 2 % 2; }
  // The barriers of a quarter: that a chunk is there, and that all warps have read it.
  __device__ __forceinline__ static unsigned full(unsigned shared, unsigned quarter) { return shared + kBarriers + quarter * 8; }
  __device__ __forceinline__ static unsigned empty(unsigned shared, unsigned quarter) {
    return full(shared, quarter) + kRing * 8;
  }
};

// The offset of a quarter.
__device__ __forceinline__ unsigned quarter_offset(unsigned quarter) {
  return quarter & 2 ? kTableBytes + (quarter & 1) * 128 : 128 + (quarter & 1) * (kQuarterSlots * kTableStride);
}
__device__ __forceinline__ unsigned slot_offset(int slot) {
  return quarter_offset(slot / kQuarterSlots) + slot % kQuarterSlots * kTableStride;
}

}  // namespace nf4
