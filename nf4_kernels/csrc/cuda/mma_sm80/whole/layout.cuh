// What the parts of linear_mma_whole.cuh share: arguments and the layout of shared memory.
#pragma once

#include "../layout.cuh"
#include "../table.cuh"

namespace nf4 {

// A step is so many k blocks (64 k) of each k warp: 128 bytes of a row.
constexpr int kStepBlocks = 4;
// Activations lie in a ring: in the second halves of the table's entries and behind the table, 256 bytes from slot to slot of a
// quarter. A slot is 64 k of a token.
constexpr int kRingSlots = 512, kQuarterSlots = kRingSlots / 4;
// Hardware barriers: that the ring's barriers are set up, for loaders; and that everything is, for consumers.
constexpr int kLoadersBarrier = 1, kReadyBarrier = 2;

struct WholeArgs : MmaArgs {
  // Of the thread block's warps row_warps have rows of their own, for each of these rows k_warps share k, and the rest loads.
  int row_warps, k_warps, loaders;
  int steps;                 // of a tile
  int tiles, tiles_of_block;  // tiles in order: thread block b has those from b * tiles_of_block on
};

// The offsets of a quarter of the ring, and of a slot.
__device__ __forceinline__ unsigned quarter_offset(unsigned quarter) {
  return quarter & 2 ? kTableBytes + (quarter & 1) * 128 : 128 + (quarter & 1) * (kQuarterSlots * kTableStride);
}
__device__ __forceinline__ unsigned slot_offset(int slot) {
  return quarter_offset(slot / kQuarterSlots) + slot % kQuarterSlots * kTableStride;
}

// An instance: at most so many warps. The first of them are consumers, each with kRowTiles m16 tiles and kTiles token tiles of 8
// tokens; the others load activations, in chunks of kChunk k blocks of each k warp. Dynamic shared memory:
//   the table (rows/layout.cuh): 256 entries, 256 bytes apart, each with 32 copies in its first 128 bytes
//   the ring of activations; also the sums that k warps hand over
//   the code of nested scales
template <int kWarps_, int kRowTiles_, int kTiles_, int kChunk_>
struct WholeShape {
  static constexpr int kWarps = kWarps_, kRowTiles = kRowTiles_, kTiles = kTiles_, kChunk = kChunk_, kTokens = kTiles * 8;
  static constexpr int kThreads = kWarps * 32, kRows = kRowTiles * 2, kStepChunks = kStepBlocks / kChunk;
  // Sums of 64 k take registers, for which there is no room here: sums are in units of the latest scale.
  static constexpr bool kRescales = kRowTiles == 2 && kTiles >= 8;
  // Token tiles that are multiplied at the same time: so many sums do not wait for one another.
  static constexpr int kGroup = kTiles < 4 ? kTiles : kRowTiles == 2 && !kRescales ? 2 : kTiles % 4 ? kTiles / 2 : 4;
  static constexpr int kScaleCode = kTableBytes + kQuarterSlots * kTableStride;
  static constexpr int kBarriers = kScaleCode + 1024;
  // The ring's parts, a chunk each: two have room for four k warps of 48 and 64 tokens.
  static constexpr unsigned kParts = kRowTiles == 1 && kTiles >= 6 ? 2 : 4;
  static constexpr int kTotal = kBarriers + 2 * kParts * 8;
  static constexpr int kBlockSlots = kParts == 2 ? 64 : kTokens;  // of a k block
  static constexpr int kMaxKWarps = kRingSlots / kParts / (kChunk * kBlockSlots);
  static_assert(kTotal <= 99 << 10 && kMaxKWarps > 0 && kChunk <= 2, "");
  // What k warps hand over.
  static_assert((kWarps - 1) * (kMaxKWarps - 1) / kMaxKWarps * kRowTiles * kTiles * 4 <= kRingSlots, "");
  // The part of a chunk, and the parity of its barriers' phases that end with it.
  __device__ __forceinline__ static unsigned part(unsigned chunk) { return chunk % kParts; }
  __device__ __forceinline__ static unsigned parity(unsigned chunk) { return chunk / kParts % 2; }
  // Byte offset of a k block of a part's chunk.
  __device__ __forceinline__ static unsigned offset(unsigned part, int block) {
    return kParts == 2 ? slot_offset(part * (kRingSlots / 2) + block * kBlockSlots)
                       : quarter_offset(part) + block * (kTokens * kTableStride);
  }
  // The barriers of a part: that a chunk is there, and that all warps have read it.
  __device__ __forceinline__ static unsigned full(unsigned shared, unsigned part) { return shared + kBarriers + part * 8; }
  __device__ __forceinline__ static unsigned empty(unsigned shared, unsigned part) { return full(shared, part) + kParts * 8; }
};

}  // namespace nf4
