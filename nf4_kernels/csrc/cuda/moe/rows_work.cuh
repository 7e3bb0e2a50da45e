// What the warps of rows.cuh share: arguments, a thread block's units, and the warps that load codes and scales and decode
// these.
#pragma once

#include "../rows/weights_and_scales.cuh"
#include "groups.cuh"

namespace nf4 {

struct MoeRowsArgs {
  Nf4Weight weight;  // of one expert; those of the others lie behind it
  const void* x;
  const int* experts;
  const void* bias;
  const float* routing;
  void* out;
  float* partial;  // null, or [parts][choices][n]: results times their routing weights, which a launch behind adds up
  GroupList list;  // words are null where a thread block groups the choices itself
  int choices, num_experts;
  int x_choices;  // that share a row of x
  bool same_x;    // all choices do
  int n;          // rows of an expert
  int columns;    // of the output
  int activation;
  int k, k_blocks, scale_shift;
  int part_blocks, parts;
  int row_groups;  // of an expert
  int stages, held_groups;
};

// A thread block's units, one after another: a unit is one group, one part of k and one row group. The 16 rows of a row group
// are neighbours, or with an activation 8 gates and their 8 ups.
struct MoeRun {
  int left, at, part, row_group;  // at: the group's place among the held ones
  __device__ __forceinline__ MoeRun(const MoeRowsArgs& args, int groups) {
    int units = args.parts * args.row_groups;
    Share share(groups, units);
    left = share.count;
    int rest = share.first % units;
    at = 0;
    part = rest / args.row_groups;
    row_group = rest % args.row_groups;
  }
  __device__ __forceinline__ bool done() const { return left == 0; }
  __device__ __forceinline__ void next(const MoeRowsArgs& args) {
    --left;
    if (++row_group < args.row_groups) return;
    row_group = 0;
    if (++part < args.parts) return;
    part = 0;
    ++at;
  }
  // The first row, of all experts' rows, of the row group's half, and how many rows of that there are.
  __device__ __forceinline__ int first_row(const MoeRowsArgs& args, int expert, int half) const {
    int row = args.activation ? half * args.columns + row_group * kHalfRows : row_group * kGroupRows + half * kHalfRows;
    return expert * args.n + min(row, args.n - 1);
  }
  __device__ __forceinline__ int rows(const MoeRowsArgs& args, int half) const {
    int left = args.activation ? args.columns - row_group * kHalfRows
                               : args.n - row_group * kGroupRows - half * kHalfRows;
    return max(1, min(kHalfRows, left));
  }
};

// Scales lie in a stage as they do in memory, from the 16-byte boundary before a half's first one on; where k is in parts,
// each row's for itself.
template <bool kNested>
struct MoeScales {
  static constexpr int kSize = kNested ? 1 : 4;
  int64_t first, last;  // indices of the first and the last
  __device__ __forceinline__ MoeScales(const MoeRowsArgs& args, int row, int rows, int begin, int count) {
    first = (int64_t{row} * args.k_blocks + begin) >> args.scale_shift;
    last = (int64_t{row + rows - 1} * args.k_blocks + begin + count - 1) >> args.scale_shift;
  }
  __device__ __forceinline__ int64_t piece() const { return first & ~int64_t{16 / kSize - 1}; }
  __device__ __forceinline__ unsigned bytes() const {
    return static_cast<unsigned>((((last + 1) * kSize + 15) & ~int64_t{15}) - piece() * kSize);
  }
};

// Loads a stage: the codes of a unit, and their scales.
template <typename Layout, bool kNested>
__device__ __forceinline__ void load_unit(const MoeRowsArgs& args, unsigned base, const MoeRun& run, int expert,
                                          int stage) {
  constexpr int kSize = kNested ? 1 : 4;
  const char* codes = reinterpret_cast<const char*>(args.weight.packed);
  const char* scales = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                               : reinterpret_cast<const char*>(args.weight.absmax);
  unsigned target = base + Layout::kRing + stage * Layout::kStageBytes, full = Layout::full(base, stage);
  int begin = run.part * args.part_blocks, count = min(args.part_blocks, args.k_blocks - begin);
#if __CUDA_ARCH__ >= 900
  if (elect_one()) {
    uint64_t policy = evict_first_policy();
    unsigned total = 0, bytes = count * 32;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      int row = run.first_row(args, expert, half), rows = run.rows(args, half);
      const char* from = codes + (int64_t{row} * args.k_blocks + begin) * 32;
      unsigned to = target + half * kHalfRows * Layout::kWeightPitch;
      if (rows == kHalfRows) {
#pragma unroll
        for (int r = 0; r < kHalfRows; ++r, from += args.k_blocks * 32) {
          bulk_copy(to + r * Layout::kWeightPitch, from, bytes, full, policy);
        }
      } else {
#pragma unroll 1
        for (int r = 0; r < rows; ++r, from += args.k_blocks * 32) {
          bulk_copy(to + r * Layout::kWeightPitch, from, bytes, full, policy);
        }
      }
      total += rows * bytes;
      to = target + Layout::kScales + half * kHalfRows * Layout::kScalePitch;
      int together = args.parts == 1 ? rows : 1;
#pragma unroll 1
      for (int r = 0; r < rows; r += together) {
        MoeScales<kNested> span(args, row + r, together, begin, count);
        bulk_copy(to + r * Layout::kScalePitch, scales + span.piece() * kSize, span.bytes(), full, policy);
        total += span.bytes();
      }
    }
    barrier_expect(full, total);
  }
  __syncwarp();
#else
  int lane = threadIdx.x % 32, r = lane % kHalfRows, half = lane / kHalfRows % 2;
  int row = run.first_row(args, expert, half), rows = run.rows(args, half);
  bool together = args.parts == 1;
  if (r >= rows || (lane >= kGroupRows && together && r > 0)) {
    copy_and_arrive(0, nullptr, 0, full);
  } else if (lane < kGroupRows) {
    int64_t block = int64_t{row + r} * args.k_blocks + begin;
    copy_and_arrive(target + lane * Layout::kWeightPitch, codes + block * 32, count * 32, full);
  } else {
    MoeScales<kNested> span(args, row + r, together ? rows : 1, begin, count);
    copy_and_arrive(target + Layout::kScales + lane % kGroupRows * Layout::kScalePitch,
                    scales + span.piece() * kSize, span.bytes(), full);
  }
#endif
}

template <typename Layout, bool kNested>
__device__ __forceinline__ void load_units(const MoeRowsArgs& args, unsigned base, MoeRun run, const int* experts) {
  RingPosition ring;
  for (int load = 0; !run.done(); run.next(args), ++load) {
    if (load >= args.stages) barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    load_unit<Layout, kNested>(args, base, run, experts[run.at], ring.stage);
    ring.advance(args.stages);
  }
}

// Decodes the scales of every stage; lane l does row l % 16.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_unit_scales(const MoeRowsArgs& args, char* shared, MoeRun run,
                                                   const int* experts, int decoder) {
  constexpr int kSize = kNested ? 1 : 4;
  unsigned base = shared_address(shared);
  int row = threadIdx.x % 16, half = row / kHalfRows;
  RowScales scales{};
  scales.code = reinterpret_cast<const float*>(shared + Layout::kCode);
  char* slots = shared + Layout::scale_slot(0, 0) + row % 8 * 8 + half * 4;
  bool fours = args.scale_shift == 0 && args.k_blocks % 4 == 0 && args.part_blocks % 4 == 0;
  RingPosition ring;
  for (; !run.done(); run.next(args)) {
    int begin = run.part * args.part_blocks;
    scales.count = min(args.part_blocks, args.k_blocks - begin);
    int first_row = run.first_row(args, experts[run.at], half), rows = run.rows(args, half);
    // Rows that are not there are decoded as the last one that is.
    int mine = min(row % kHalfRows, rows - 1);
    MoeScales<kNested> span(args, first_row + mine, 1, begin, scales.count);
    MoeScales<kNested> copied(args, args.parts == 1 ? first_row : first_row + mine, 1, begin, scales.count);
    int64_t row_block = int64_t{first_row + mine} * args.k_blocks + begin;
    if (kNested) {
      // A row has fewer than 256 blocks in a part, so they span at most two second-level scales.
      int64_t second = span.first >> 8;
      scales.low = outer_scale(args.weight, second);
      scales.high = outer_scale(args.weight, min(second + 1, span.last >> 8));
      scales.change = static_cast<int>((((second + 1) << 8) << args.scale_shift) - row_block);
    }
    int place = half * kHalfRows + (args.parts == 1 ? 0 : mine);
    const char* raw = shared + Layout::kRing + ring.stage * Layout::kStageBytes + Layout::kScales +
                      place * Layout::kScalePitch + (span.first - copied.piece()) * kSize;
    char* target = slots + ring.stage * Layout::kDecodedStage;
    barrier_wait(Layout::full(base, ring.stage), ring.parity);
    if (fours) {
      decode_fours<Layout, kNested>(raw, target, scales, decoder);
    } else {
      int phase = static_cast<int>(row_block & ((1 << args.scale_shift) - 1));
      decode_any<Layout, kNested>(raw, target, scales, decoder, phase, args.scale_shift);
    }
    barrier_arrive(Layout::decoded(base, ring.stage));
    ring.advance(args.stages);
  }
}

}  // namespace nf4
