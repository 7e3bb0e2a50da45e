// What the parts of linear_mma.cuh share: arguments, the layout of shared memory, a thread block's share of the work.
#pragma once

#include "../clock.cuh"
#include "../gate.cuh"
#include "../mma.cuh"
#include "../pipeline.cuh"
#include "../rows/layout.cuh"

namespace nf4 {

// A tile has the same rows in every instance: 16 m16 tiles, divided among the warps.
constexpr int kMmaRows = 256, kMmaRowTiles = kMmaRows / 16;

struct MmaArgs {
  Nf4Weight weight;
  const void* x;
  const void* bias;
  const void* residual;
  void* out;
  float4* partials;  // of split tiles: two for each thread block
  int* counters;
  uint64_t* clock;
  int m, n, k;
  int k_steps;      // k / 64
  int token_tiles;  // neighbours in the order of tiles, so that a weight row is read by all of them at about the same time
  int scale_shift;  // log2(blocksize / 64)
  // Where k steps lie in the groups of 256 nested scales, which in a shard are the whole weight's: the first k step of all,
  // and how far one row's lie behind those of the row before.
  int place_first, place_pitch;
  // Groups of `parts` thread blocks have `span` k steps each, in order: a tile's, or those of all tiles. In a group each thread
  // block has `share` of them, and the first `more` one more.
  int span, parts, share, more;
  Gate gate;

  // A row of m16 tile `tile` of all. Where the epilogue gates, the lower half of its rows are gates and the upper one their
  // ups, so that a thread has both.
  __device__ __forceinline__ int row(int tile, int r) const {
    return gate.columns ? tile * 8 + r % 8 + r / 8 * gate.columns : tile * 16 + r;
  }
  // The same, or the weight's last row.
  __device__ __forceinline__ int row_within(int tile, int r) const { return min(row(tile, r), n - 1); }
  __device__ __forceinline__ int first_step(int block) const {
    int group = block / parts, part = block - group * parts;
    return group * span + part * share + min(part, more);
  }
  __device__ __forceinline__ int block_of(int step) const {
    int group = step / span, longer = more * (share + 1);
    step -= group * span;
    return group * parts + (step < longer ? step / (share + 1) : more + (step - longer) / share);
  }
};

// A k step among those of all tiles.
struct MmaStep {
  int row_tile, token_tile, k_step;
  MmaStep() = default;
  __device__ __forceinline__ MmaStep(const MmaArgs& args, int step) {
    int tile = step / args.k_steps;
    k_step = step - tile * args.k_steps;
    row_tile = tile / args.token_tiles;
    token_tile = tile - row_tile * args.token_tiles;
  }
  __device__ __forceinline__ void next_tile(const MmaArgs& args) {
    k_step = 0;
    if (++token_tile == args.token_tiles) {
      token_tile = 0;
      ++row_tile;
    }
  }
  __device__ __forceinline__ void advance(const MmaArgs& args, int steps) {
    int to = k_step + steps;
    for (; to >= args.k_steps; to -= args.k_steps) next_tile(args);
    k_step = to;
  }
  __device__ __forceinline__ int tile(const MmaArgs& args) const { return row_tile * args.token_tiles + token_tile; }
};

// An instance: warps of a thread block, token tiles of 8 tokens. Dynamic shared memory:
//   the table (rows/layout.cuh): 256 entries, 256 bytes apart, each with 32 copies in its first 128 bytes
//   the activations' ring, in the second 128 bytes of the entries: 64 k of a token are a slot
//   the codes' ring: 64 k of the tile's rows are a stage
//   the code of nested scales
template <int kWarps_, int kTiles_>
struct MmaShape {
  static constexpr int kWarps = kWarps_, kTiles = kTiles_, kThreads = kWarps * 32;
  static constexpr int kRowTiles = kMmaRowTiles / kWarps;  // m16 tiles of a warp
  static constexpr int kTokens = kTiles * 8;
  static constexpr int kParts = 2;  // tiles of which a thread block may have a part
  // Activations come in chunks of so many k steps. A barrier says that a chunk is there, another that all warps have read it.
  static constexpr int kChunk = kTokens >= 48 ? 1 : kTokens >= 24 ? 2 : kTokens >= 16 ? 4 : 8;
  static constexpr int kChunkSlots = kChunk * kTokens;
  static constexpr int kChunks = 256 / kChunkSlots >= 4 ? 4 : 2;
  static_assert(kChunks * kChunkSlots <= 256, "");
  static constexpr int kRing = kChunks * kChunk;  // k steps of which activations are held
  // While one k step is multiplied the next one's codes are decoded, as far as registers go.
  static constexpr bool kDecodesAhead = kTiles <= 12;
  // Loads of codes are so many k steps ahead of the multiplication; those of the last kPending need not have arrived. Chunks of
  // activations are kChunksAhead ahead.
  static constexpr unsigned kStages = 4;
  static constexpr int kCodesAhead = 3, kPending = kCodesAhead - 1 - kDecodesAhead;
  static constexpr int kChunksAhead = kChunks / 2;
  static constexpr int kStageBytes = kMmaRows * 32;
  static constexpr int kCodes = kTableBytes;
  static constexpr int kScaleCode = kCodes + kStages * kStageBytes;
  static constexpr int kBarriers = kScaleCode + 1024;
  static constexpr int kTotal = kBarriers + 2 * kChunks * 8;
  static_assert(kTotal <= 99 << 10, "");
  // Token tiles that are multiplied at the same time: so many sums do not wait for one another.
  static constexpr int kGroup = kTiles % 4 == 0 && kTiles < 12 ? 4 : kTiles % 3 == 0 && kTiles < 12 ? 3 : kTiles >= 2 ? 2 : 1;
  static constexpr int kBlocks = kTiles / kGroup * 4;  // in which a k step is multiplied
  // Where the loads of a k step are issued: with two chunks as late as they may be, since all warps must have read the one
  // before.
  static constexpr int kLoadBlock = kChunks == 2 ? kBlocks / 2 : 0;
  // The first m16 tile, of all, and the first token of this thread's warp.
  __device__ __forceinline__ static int first_row_tile(const MmaStep& at) {
    return at.row_tile * kMmaRowTiles + static_cast<int>(threadIdx.x) / 32 * kRowTiles;
  }
  __device__ __forceinline__ static int first_token(const MmaStep& at) { return at.token_tile * kTokens; }
  __device__ __forceinline__ static unsigned full(unsigned base, unsigned chunk) {
    return base + kBarriers + chunk % kChunks * 8;
  }
  __device__ __forceinline__ static unsigned empty(unsigned base, unsigned chunk) {
    return full(base, chunk) + kChunks * 8;
  }
  // The parity of a barrier's phase that ends with this chunk.
  __device__ __forceinline__ static unsigned parity(unsigned chunk) { return chunk / kChunks % 2; }
  // Byte offset of the activations of a k step.
  __device__ __forceinline__ static unsigned activations(unsigned index) {
    return index % kRing * (kTokens * kTableStride) + 128;
  }
};

}  // namespace nf4
