// What the warps of rows.cuh share: arguments, a thread block's units, and the warps that load codes and scales and decode
// these.
#pragma once

#include "../rows/weights_and_scales.cuh"
#include "groups.cuh"
#include "rows_layout.cuh"

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
  int choices, num_experts, top_k, tokens;
  int x_choices;     // that share a row of x
  bool all_columns;  // all choices fit in the columns of a group: choice c has column c in every group, so x is loaded once
  bool adds;         // all choices of a row are a thread block's, which adds them up itself (needs all_columns)
  bool follows_gated;  // see Nf4Moe; not where a launch in front lists the groups
  int n;             // rows of an expert
  int columns;       // of the output
  int activation;
  int k, k_blocks, scale_shift;
  int part_blocks, parts;
  int halves;      // halves of row groups: 8 rows, or with an activation 8 gates
  int row_groups;  // of an expert
  int stages, held_groups;
};

// A warp arrives at a barrier behind what all of its lanes have read or written.
template <typename Layout>
__device__ __forceinline__ void arrive_as_warp(unsigned barrier) {
  if constexpr (Layout::kWarpArrivals == 1) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  } else {
    barrier_arrive(barrier);
  }
}

// A thread block's units, one after another: a unit is one group, one part of k and one row group. The 16 rows of a row group
// are neighbours, or with an activation 8 gates and their 8 ups. A block has consecutive units of all groups' in the order
// group, part, row group; or where it adds up the choices, a run of rows, and for each row group the units of all groups.
struct MoeRun {
  int left, at, part, half, last_half, groups;  // at: the group's place among the held ones; half: the row group's first
  __device__ __forceinline__ MoeRun(const MoeRowsArgs& args, int groups) : at(0), part(0), groups(groups) {
    if (args.adds) {
      Share share(1, args.halves);
      half = share.first;
      last_half = share.first + share.count;
      left = (share.count + 1) / 2 * groups;
      return;
    }
    int units = args.parts * args.row_groups;
    Share share(groups, units);
    left = share.count;
    int rest = share.first % units;
    part = rest / args.row_groups;
    half = rest % args.row_groups * step(args);
    last_half = args.halves;
  }
  __device__ __forceinline__ static int step(const MoeRowsArgs& args) { return args.activation ? 1 : 2; }
  __device__ __forceinline__ bool done() const { return left == 0; }
  __device__ __forceinline__ void next(const MoeRowsArgs& args) {
    --left;
    if (args.adds) {
      if (++at < groups) return;
      at = 0;
      half += 2;
      return;
    }
    half += step(args);
    if (half < last_half) return;
    half = 0;
    if (++part < args.parts) return;
    part = 0;
    ++at;
  }
  // The first row, of all experts' rows, of the row group's upper or lower 8, and how many of them there are.
  __device__ __forceinline__ int first_row(const MoeRowsArgs& args, int expert, int lower) const {
    int row = args.activation ? lower * args.columns + half * kHalfRows : (half + lower) * kHalfRows;
    return expert * args.n + min(row, args.n - 1);
  }
  __device__ __forceinline__ int rows(const MoeRowsArgs& args, int lower) const {
    int left = args.activation ? args.columns - half * kHalfRows
                               : min(args.n, last_half * kHalfRows) - (half + lower) * kHalfRows;
    return max(0, min(kHalfRows, left));
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

// Loads the codes and scales of a unit; returns how many bytes are on their way. One lane calls it.
template <typename Layout, bool kNested>
__device__ __forceinline__ unsigned load_unit(const MoeRowsArgs& args, unsigned target, unsigned full, const MoeRun& run,
                                              int expert, uint64_t policy) {
  constexpr int kSize = kNested ? 1 : 4;
  const char* codes = reinterpret_cast<const char*>(args.weight.packed);
  const char* scales = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                               : reinterpret_cast<const char*>(args.weight.absmax);
  int begin = run.part * args.part_blocks, count = min(args.part_blocks, args.k_blocks - begin);
  unsigned total = 0, bytes = count * 32;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    int row = run.first_row(args, expert, half), rows = run.rows(args, half);
    if (rows == 0) break;
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
    to = target + Layout::kCodeBytes + half * kHalfRows * Layout::kScalePitch;
    int together = args.parts == 1 ? rows : 1;
#pragma unroll 1
    for (int r = 0; r < rows; r += together) {
      MoeScales<kNested> span(args, row + r, together, begin, count);
      bulk_copy(to + r * Layout::kScalePitch, scales + span.piece() * kSize, span.bytes(), full, policy);
      total += span.bytes();
    }
  }
  return total;
}

// The same before sm_90, by a whole warp, whose lanes do not arrive yet.
template <typename Layout, bool kNested>
__device__ __forceinline__ void load_unit_by_warp(const MoeRowsArgs& args, unsigned target, const MoeRun& run,
                                                  int expert) {
  constexpr int kSize = kNested ? 1 : 4;
  const char* codes = reinterpret_cast<const char*>(args.weight.packed);
  const char* scales = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                               : reinterpret_cast<const char*>(args.weight.absmax);
  auto copy = [](unsigned to, const char* from, unsigned bytes) {
    for (unsigned done = 0; done < bytes; done += 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + done), "l"(from + done) : "memory");
    }
  };
  int begin = run.part * args.part_blocks, count = min(args.part_blocks, args.k_blocks - begin);
  int lane = threadIdx.x % 32, r = lane % kHalfRows, half = lane / kHalfRows % 2;
  int row = run.first_row(args, expert, half), rows = run.rows(args, half);
  bool together = args.parts == 1;
  if (r >= rows) return;
  if (lane < kGroupRows) {
    int64_t block = int64_t{row + r} * args.k_blocks + begin;
    copy(target + lane * Layout::kWeightPitch, codes + block * 32, count * 32);
  } else if (r == 0 || !together) {
    MoeScales<kNested> span(args, row + r, together ? rows : 1, begin, count);
    copy(target + Layout::kCodeBytes + lane % kGroupRows * Layout::kScalePitch, scales + span.piece() * kSize, span.bytes());
  }
}

// The producer warp: a stage holds the next units, one for each team.
template <typename Layout, bool kNested>
__device__ __forceinline__ void load_units(const MoeRowsArgs& args, unsigned base, MoeRun run, const int* experts) {
  RingPosition ring;
  for (int load = 0; !run.done(); ++load) {
    if (load >= args.stages) barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    unsigned full = Layout::full(base, ring.stage);
#if __CUDA_ARCH__ >= 900
    bool one = elect_one();
    uint64_t policy = evict_first_policy();
    unsigned total = 0;
#pragma unroll 1
    for (int team = 0; team < Layout::kTeams && !run.done(); ++team, run.next(args)) {
      if (one) {
        total += load_unit<Layout, kNested>(args, base + Layout::codes(ring.stage, team), full, run, experts[run.at], policy);
      }
    }
    if (one) barrier_expect(full, total);
    __syncwarp();
#else
    for (int team = 0; team < Layout::kTeams && !run.done(); ++team, run.next(args)) {
      load_unit_by_warp<Layout, kNested>(args, base + Layout::codes(ring.stage, team), run, experts[run.at]);
    }
    copy_and_arrive(0, nullptr, 0, full);
#endif
    ring.advance(args.stages);
  }
}

// What a lane needs to decode the scales of one row of a unit.
template <typename Layout, bool kNested>
struct UnitScales {
  RowScales scales;
  const char* raw;
  int phase;
  __device__ __forceinline__ UnitScales() : scales{}, raw(nullptr), phase(0) {}
  __device__ __forceinline__ void find(const MoeRowsArgs& args, const char* of_unit, const MoeRun& run, int expert) {
    constexpr int kSize = kNested ? 1 : 4;
    int row = threadIdx.x % 16, half = row / kHalfRows, begin = run.part * args.part_blocks;
    scales.count = min(args.part_blocks, args.k_blocks - begin);
    int first_row = run.first_row(args, expert, half), rows = run.rows(args, half);
    // Rows beyond the last one are decoded as the last one.
    int mine = max(0, min(row % kHalfRows, rows - 1));
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
    raw = of_unit + place * Layout::kScalePitch + (span.first - copied.piece()) * kSize;
    phase = static_cast<int>(row_block & ((1 << args.scale_shift) - 1));
  }
};

// The warps that decode scales, of which lane l does row l % 16; both take part in every unit. The second-level scales of all
// units of a stage are on their way before the stage is waited for.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_unit_scales(const MoeRowsArgs& args, char* shared, MoeRun run,
                                                   const int* experts, int decoder) {
  unsigned base = shared_address(shared);
  int row = threadIdx.x % 16;
  const float* code = reinterpret_cast<const float*>(shared + Layout::kCode);
  char* slots = shared + Layout::scale_slot(0, 0) + row % 8 * 8 + row / 8 * 4;
  bool fours = args.scale_shift == 0 && args.k_blocks % 4 == 0 && args.part_blocks % 4 == 0;
  RingPosition ring;
  while (!run.done()) {
    char* target = slots + ring.stage * Layout::kDecodedStage;
    UnitScales<Layout, kNested> units[Layout::kTeams];
#pragma unroll
    for (int team = 0; team < Layout::kTeams; ++team) {
      if (run.done()) break;
      units[team].find(args, shared + Layout::codes(ring.stage, team) + Layout::kCodeBytes, run, experts[run.at]);
      units[team].scales.code = code;
      run.next(args);
    }
    barrier_wait(Layout::full(base, ring.stage), ring.parity);
#pragma unroll
    for (int team = 0; team < Layout::kTeams; ++team) {
      const auto& unit = units[team];
      if (!unit.raw) break;
      char* to = target + team * (Layout::kUnitBlocks / 2) * kTableStride;
      if (fours) {
        decode_fours<typename Layout::Unit, kNested>(unit.raw, to, unit.scales, decoder);
      } else {
        decode_any<typename Layout::Unit, kNested>(unit.raw, to, unit.scales, decoder, unit.phase, args.scale_shift);
      }
    }
    barrier_arrive(Layout::decoded(base, ring.stage));
    ring.advance(args.stages);
  }
}

}  // namespace nf4
