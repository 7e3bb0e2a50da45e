// What the parts of linear_mma_wide.cuh share: an instance's shape and its layout of shared memory.
#pragma once

#include "../layout.cuh"
#include "../table.cuh"

namespace nf4 {

// An instance: 8 warps, four for the rows of a tile times two for its tokens, each with kRowTiles m16 tiles and kTiles token
// tiles of 8 tokens. Dynamic shared memory:
//   the table (rows/layout.cuh): 256 entries, 256 bytes apart, each with 32 copies in its first 128 bytes
//   two stages of activations, in the second 128 bytes of the entries: 64 k of a token are a slot
//   three stages of codes: 64 k of the tile's rows
//   four stages of what sums of the rows are multiplied by
//   the code of nested scales
// A half step is 32 k. Two barriers of each of four half steps say that its activations are there, and that all warps have read
// them. So no warp waits for another one that is less than one and a half half steps behind.
template <int kRowTiles_, int kTiles_>
struct WideShape {
  static constexpr int kRowTiles = kRowTiles_, kTiles = kTiles_, kWarps = 8, kThreads = 256, kRowWarps = 4;
  static constexpr int kRows = kRowWarps * kRowTiles * 16, kTokens = 2 * kTiles * 8;
  static constexpr int kParts = 1;  // tiles of which a thread block may have a part
  static constexpr unsigned kStages = 3;
  static constexpr int kStageBytes = kRows * 32;
  static constexpr int kCodes = kTableBytes;
  static constexpr int kRatios = kCodes + kStages * kStageBytes, kRatioBytes = kRows * 4;
  static constexpr int kScaleCode = kRatios + 4 * kRatioBytes;
  static constexpr int kBarriers = kScaleCode + 1024;
  static constexpr int kTotal = kBarriers + 8 * 8;
  static_assert(kTotal <= 99 << 10 && 2 * kTokens <= 256, "");
  // Token tiles that are multiplied at the same time.
  static constexpr int kGroup = 2, kGroups = (kTiles + kGroup - 1) / kGroup;
  __device__ __forceinline__ static int row_warp() { return threadIdx.x / 32 % kRowWarps; }
  __device__ __forceinline__ static int token_warp() { return threadIdx.x / 32 / kRowWarps; }
  // The first m16 tile, of all, and the first token of this thread's warp.
  __device__ __forceinline__ static int first_row_tile(const MmaStep& at) {
    return (at.row_tile * kRowWarps + row_warp()) * kRowTiles;
  }
  __device__ __forceinline__ static int first_token(const MmaStep& at) {
    return at.token_tile * kTokens + token_warp() * kTiles * 8;
  }
  // Byte offset of a k step's codes, activations and ratios.
  __device__ __forceinline__ static unsigned codes(unsigned index) { return kCodes + index % kStages * kStageBytes; }
  __device__ __forceinline__ static unsigned activations(unsigned index) { return index % 2 * (128 * kTableStride) + 128; }
  __device__ __forceinline__ static unsigned ratios(unsigned index) { return kRatios + index % 4 * kRatioBytes; }
  // The barriers of half steps of a k step, and the parity of the phase that ends with these.
  __device__ __forceinline__ static unsigned full(unsigned base, unsigned index, int half) {
    return base + kBarriers + (index % 2 * 2 + half) * 8;
  }
  __device__ __forceinline__ static unsigned read(unsigned base, unsigned index, int half) {
    return full(base, index, half) + 4 * 8;
  }
  __device__ __forceinline__ static unsigned parity(unsigned index) { return index / 2 % 2; }
};

}  // namespace nf4
