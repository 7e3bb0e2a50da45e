// What the warps of linear_rows.cuh share: arguments, the layout of shared memory, a thread block's share of the work.
#pragma once

#include "../clock.cuh"
#include "../gate.cuh"
#include "sync.cuh"

namespace nf4 {

constexpr int kGroupRows = 16;
// A run of row groups ends at a multiple of half a group: the lower half of its last group may be the next run's.
constexpr int kHalfRows = kGroupRows / 2;
constexpr int kMaxStages = 7;
constexpr int kMaxCluster = 4;
// The hardware barriers of a thread block: the decoders' own; all threads', behind which the table is filled; and the one at
// which the producer warp waits for the shared-memory barriers that another warp sets up.
constexpr int kDecoderBarrier = 2;
constexpr int kTableBarrier = 3;
constexpr int kBarriersReady = 4;
// Table entries lie 256 bytes apart, so that a byte permute makes an entry's offset: the 32 copies fill the first half
// of each entry; the second halves hold the decoded scales.
constexpr int kTableStride = 256;
constexpr int kTableBytes = 256 * kTableStride;
// Where dynamic shared memory starts: from sm_90 on behind the system's first KB. As a constant it goes into the table
// lookups' immediate offsets; the kernel checks it. In a cluster a block's rank is added in the highest byte of every
// address. (NF4_POSED builds have older code that a newer device's driver compiles.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 && !defined(NF4_POSED)
constexpr int kSharedBase = 0;
#else
constexpr int kSharedBase = 1024;
#endif
// How much shared memory a thread block can have.
constexpr int kSmallSharedBytes = 99 << 10;
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int kSharedBytes = 227 << 10;
#elif __CUDA_ARCH__ == 800
constexpr int kSharedBytes = 163 << 10;
#else
constexpr int kSharedBytes = kSmallSharedBytes;
#endif
// Whether plans have an instance that takes so much shared memory on this target: what has room on GPUs with the least is for
// these alone, which may run code of 8.0, too. The kernels of all others are empty.
template <int kBytes>
constexpr bool kIsPlanned =
    kBytes <= kSharedBytes && (kBytes > kSmallSharedBytes || kSharedBytes <= 163 << 10);

// Arrivals at a stage's `full` barrier: one lane issues bulk copies; before sm_90 a whole warp copies pieces.
#if __CUDA_ARCH__ >= 900
constexpr int kCopyArrivals = 1;
#else
constexpr int kCopyArrivals = 32;
#endif

struct RowsArgs {
  Nf4Weight weight;
  const void* x;
  const void* bias;
  void* out;
  int m, n, k;
  int k_blocks;     // k / 64
  int scale_shift;  // log2(blocksize / 64)
  int cluster;      // blocks that share row groups (split-K): each has parts of k of its own
  int passes;       // parts of k that a block goes through one after another
  int part_blocks;  // 64-wide k blocks of a part
  int stages;           // of the ring
  int run_units;        // of kRunRows rows, in a cluster's run; the first runs_with_more clusters do one more
  int runs_with_more;
  int scale_pitch;      // scales of a row where all rows' begin at multiples of 16 bytes, else 0
  int whole_rows;       // whether 16 bytes more may be read behind those of each row but the last
  int chunk;            // row groups that go through all passes together
  int constant_weights; // weights and scales may be read before the kernel in front of this one has ended
  // Nanoseconds between the loads that fill the ring: while the activations are not there, and between all of them.
  unsigned waiting_delay, later_delay;
  uint64_t* clock;
  const void* residual;
  const void* norm_weight;
  float norm_eps;
  // Where k blocks lie in the groups of 256 nested scales, which in a shard are the whole weight's: the first k block of all,
  // and how far one row's lie behind those of the row before.
  int place_first, place_pitch;
  Gate gate;

  // The weight's row of row r of the group that begins with row `first` of a run. Where the epilogue gates, the upper half of
  // a group is gates and the lower half their ups.
  template <bool kGates>
  __device__ __forceinline__ int weight_row(int first, int r) const {
    return kGates ? first / 2 + r % kHalfRows + r / kHalfRows * gate.columns : first + r;
  }
  // How many rows of the weight lie between a group's halves.
  template <bool kGates>
  __device__ __forceinline__ int rows_between() const {
    return kGates ? gate.columns - kHalfRows : 0;
  }
};

// Runs end at multiples of so many rows: of half a row group, or where the epilogue gates of a whole one.
template <bool kGates>
constexpr int kRunRows = kGates ? kGroupRows : kHalfRows;

// The layout of dynamic shared memory.
template <int kConsumers, int kBlocks, bool kNested>
struct RowsLayout {
  // Beside the consumers there are a producer warp, one that reduces, and two that decode scales.
  static constexpr int kWarps = kConsumers, kDecoders = 2, kThreads = (kWarps + 2 + kDecoders) * 32;
  static constexpr int kStageBlocks = kWarps * kBlocks;
  // On Hopper a stage's codes may be loaded in two pieces with a barrier each. Decoding then begins behind the first, which
  // is this many k blocks of a warp, and less is left to do behind the last byte. With 0 they are one piece, where the
  // additional copies would cost more than that.
  static constexpr int kFirstBlocks = kBlocks == 4 ? 2 : 0;
  // The pitch is an odd multiple of 32 bytes: the rows g = 0..3 of a half warp's 8-byte reads then lie in different banks.
  static constexpr int kWeightPitch = kStageBlocks * 32 + (kStageBlocks % 2 ? 0 : 32);
  // There is room from the 16-byte boundary before the first scale to the one after the last.
  static constexpr int kScaleBytes = kStageBlocks * (kNested ? 1 : 4);
  static constexpr int kScalePitch = ((kScaleBytes + 15 + 15) / 16 | 1) * 16;
  static constexpr int kScales = kGroupRows * kWeightPitch;
  static constexpr int kStageBytes = kScales + kGroupRows * kScalePitch;
  static constexpr int kCode = kTableBytes;
  // The consumers' sums of squares, [warp][token]. Where scales are plain, they take the place of the scales' codes.
  static constexpr int kSquares = kCode + (kNested ? 1024 : 0), kSquaresBytes = kWarps * 32;
  static constexpr int kSums = kCode + 1024 + (kNested ? kSquaresBytes : 0);
  static constexpr int kBarriers = kSums + 2 * kWarps * 512;
  // There is a barrier more than stages for each of their purposes; the one beyond `decoded` is that of the activations.
  static constexpr int kStageSlots = kMaxStages + 1, kBarrierCount = 3 * kStageSlots + 8;
  static constexpr int kRing = kBarriers + kBarrierCount * 8;
  static_assert(kRing % 128 == 0, "");
  // The decoded scales of a stage take 64 bytes a k block; those of two k blocks lie between two table entries.
  static constexpr int kDecodedStage = (kStageBlocks + 1) / 2 * kTableStride;
  static constexpr int kSlots = kTableBytes / kDecodedStage, kLimit = kFirstBlocks ? kStageSlots / 2 : kMaxStages;
  static constexpr int kStageLimit = kSlots < kLimit ? kSlots : kLimit;

  // Behind the ring lie two slots for the partial sums of each other block of the cluster, then those that wait for the next
  // pass.
  __host__ __device__ static constexpr int partials(int stages) { return kRing + stages * kStageBytes; }
  __host__ __device__ static constexpr int held(int stages, int cluster) {
    return partials(stages) + 2 * (cluster - 1) * 512;
  }
  __host__ __device__ static constexpr int total(int stages, int cluster, int held_groups) {
    return held(stages, cluster) + held_groups * 512;
  }
  __device__ static unsigned barrier(unsigned base, int index) { return base + kBarriers + index * 8; }
  __device__ static unsigned full(unsigned base, int stage) { return barrier(base, stage); }
  // The codes' second piece is there.
  __device__ static unsigned rest_full(unsigned base, int stage) { return barrier(base, kStageSlots / 2 + stage); }
  __device__ static unsigned decoded(unsigned base, int stage) { return barrier(base, kStageSlots + stage); }
  __device__ static unsigned empty(unsigned base, int stage) { return barrier(base, 2 * kStageSlots + stage); }
  __device__ static unsigned sums_full(unsigned base, int i) { return barrier(base, 3 * kStageSlots + i); }
  __device__ static unsigned sums_empty(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 2 + i); }
  __device__ static unsigned partials_full(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 4 + i); }
  __device__ static unsigned partials_free(unsigned base, int i) { return barrier(base, 3 * kStageSlots + 6 + i); }
  // The block's first activations are there.
  __device__ static unsigned activations(unsigned base) { return barrier(base, 2 * kStageSlots - 1); }
  // Byte offset of the partial sums that another block of the cluster sends.
  __device__ static int partial_slot(const RowsArgs& args, int i, int rank) {
    return partials(args.stages) + (i * (args.cluster - 1) + rank - 1) * 512;
  }
  // Byte offset of the decoded scales [row % 8][row / 8] of one k block of a stage.
  __device__ static int scale_slot(int stage, int block) {
    return stage * kDecodedStage + (block >> 1) * kTableStride + 128 + (block & 1) * 64;
  }
};

// The (row group, part of k) pairs of a thread block, each of which is one stage of the ring. Its cluster has a run of row
// groups to itself; the block goes through them chunk by chunk, and through a chunk once for each of its parts (a pass).
struct RowsRun {
  int row, last, chunk_first, chunk_last, pass, part, first_part, chunk, passes;
  __device__ RowsRun(const RowsArgs& args, int run_rows)
      : pass(0), chunk(args.chunk * kGroupRows), passes(args.passes) {
    int run = blockIdx.x / args.cluster, rank = blockIdx.x % args.cluster;
    row = (run * args.run_units + min(run, args.runs_with_more)) * run_rows;
    last = min(row + (args.run_units + (run < args.runs_with_more)) * run_rows, args.n);
    part = first_part = rank * passes;
    chunk_first = row;
    chunk_last = min(row + chunk, last);
  }
  __device__ __forceinline__ bool done() const { return chunk_first >= last; }
  __device__ __forceinline__ int rows() const { return min(kGroupRows, last - row); }
  __device__ __forceinline__ bool last_pass() const { return pass == passes - 1; }
  __device__ __forceinline__ void next() {
    row += kGroupRows;
    if (row < chunk_last) return;
    if (++pass == passes) {
      pass = 0;
      chunk_first = row;
      chunk_last = min(row + chunk, last);
    }
    row = chunk_first;
    part = first_part + pass;
  }
};

struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace nf4
