// The loads of rows.cuh from sm_90 on, where k is all of a unit's and each 64 weights have a scale: a unit's codes are one
// tensor copy, where a copy for each row would take the producer warp as long as the multiplication, and the warps that decode
// scales load them to registers.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "rows_work.cuh"

namespace nf4 {

// Copies the box [256 k][16 rows][128 bytes] at a unit's first row. The map's dimensions are 128 bytes of k, rows of an
// expert (with an activation: of its gates, then gate or up), pieces of 128 bytes, experts.
__device__ __forceinline__ void copy_box(unsigned target, const void* map, bool gated, int row, int expert, unsigned barrier,
                                         uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  if (gated) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %2, %2, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(0), "r"(row), "r"(expert), "r"(barrier), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(0), "r"(row), "r"(expert), "r"(barrier), "l"(policy)
        : "memory");
  }
#endif
}

// As init_other_barriers() of linear_rows, where warps arrive and not their threads.
template <typename Layout>
__device__ __forceinline__ void init_box_barriers(unsigned base) {
  if (elect_one()) {
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(Layout::decoded(base, i), Layout::kDecoders * Layout::kWarpArrivals);
      barrier_init(Layout::empty(base, i), Layout::kWarps * Layout::kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(Layout::sums_full(base, i), Layout::kWarps * Layout::kWarpArrivals);
      barrier_init(Layout::sums_empty(base, i), Layout::kWarpArrivals);
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void prefetch_box_map(const void* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Brings a unit's scales to L2, where the warps that decode them will find them.
template <bool kNested>
__device__ __forceinline__ void prefetch_scales(const MoeRowsArgs& args, const MoeRun& run, int expert) {
#if __CUDA_ARCH__ >= 900
  constexpr unsigned kSize = kNested ? 1 : 4;
  const char* scales = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                               : reinterpret_cast<const char*>(args.weight.absmax);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned first = static_cast<unsigned>(run.first_row(args, expert, half)) * args.k_blocks;
    uint64_t at = uint64_t{first} * kSize & ~uint64_t{15};
    unsigned bytes = static_cast<unsigned>(max(run.rows(args, half), 1)) * args.k_blocks * kSize & ~15u;
    if (bytes > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(scales + at), "r"(bytes) : "memory");
    if (kNested) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.weight.absmax + (first >> 8)));
  }
#endif
}

// The producer warp, of which one lane works: a stage holds the next units, one for each team.
template <typename Layout, bool kNested>
__device__ __forceinline__ void load_boxes(const MoeRowsArgs& args, const void* map, unsigned base, MoeRun run,
                                           const int* experts) {
  if (!elect_one()) return;
  uint64_t policy = evict_first_policy();
  RingPosition ring;
  for (int load = 0; !run.done(); ++load) {
    if (load >= args.stages) barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    unsigned full = Layout::full(base, ring.stage);
    barrier_expect(full, min(run.left, Layout::kTeams) * Layout::kCodeBytes);
#pragma unroll
    for (int team = 0; team < Layout::kTeams; ++team) {
      if (run.done()) break;
      int expert = experts[run.at];
      copy_box(base + Layout::codes(ring.stage, team), map, args.activation != 0, run.half * kHalfRows, expert, full, policy);
      prefetch_scales<kNested>(args, run, expert);
      run.next(args);
    }
    ring.advance(args.stages);
  }
}

// The scales of a lane's row, four of 64 weights each at a time: the half warps of a team's decoders take them in turn.
template <typename Layout, bool kNested>
struct BoxScales {
  static constexpr int kDecoders = Layout::kTeamDecoders;
  static constexpr int kRounds = (Layout::kUnitBlocks / 4 + 2 * kDecoders - 1) / (2 * kDecoders);
  using Four = std::conditional_t<kNested, unsigned, float4>;
  Four raw[kRounds];
  float2 low, high;  // of nested scales: second-level scale and offset, before and from k block `change` of the row on
  int change;

  __device__ __forceinline__ static int first_block(int round, int decoder) {
    return (2 * (kDecoders * round + decoder) + threadIdx.x % 32 / 16) * 4;
  }
  __device__ __forceinline__ void load(const MoeRowsArgs& args, const MoeRun& run, int expert, int decoder) {
    int row = threadIdx.x % 16, half = row / kHalfRows;
    // Rows beyond the last one have the scales of the last one.
    int mine = max(0, min(row % kHalfRows, run.rows(args, half) - 1));
    unsigned first = static_cast<unsigned>(run.first_row(args, expert, half) + mine) * args.k_blocks;
    const auto* from = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit + first)
                               : reinterpret_cast<const char*>(args.weight.absmax + first);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      int block = first_block(i, decoder);
      if (block < Layout::kUnitBlocks) raw[i] = __ldg(reinterpret_cast<const Four*>(from + block * (kNested ? 1 : 4)));
    }
    if (!kNested) return;
    // A row has fewer than 256 blocks, so they span at most two second-level scales.
    low = outer_scale(args.weight, first >> 8);
    high = outer_scale(args.weight, (first + Layout::kUnitBlocks - 1) >> 8);
    change = static_cast<int>(256 - (first & 255));
  }
  // Upper half warps swap neighbours, so that the two halves of a warp always write different halves of a slot row.
  __device__ __forceinline__ void decode(char* target, const float* code, int decoder) const {
    int half = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      int block = first_block(i, decoder);
      if (block >= Layout::kUnitBlocks) break;
      float values[4];
      if constexpr (kNested) {
        unsigned word = half ? __byte_perm(raw[i], 0, 0x2301) : raw[i];
        float2 outer = block < change ? low : high;
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = nested_scale(code[word >> (8 * j) & 255], outer.x, outer.y);
      } else {
        values[0] = half ? raw[i].y : raw[i].x;
        values[1] = half ? raw[i].x : raw[i].y;
        values[2] = half ? raw[i].w : raw[i].z;
        values[3] = half ? raw[i].z : raw[i].w;
      }
      char* slots = target + block / 2 * kTableStride + half * 64;
      *reinterpret_cast<float*>(slots) = values[0];
      *reinterpret_cast<float*>(slots + 64 - 128 * half) = values[1];
      *reinterpret_cast<float*>(slots + kTableStride) = values[2];
      *reinterpret_cast<float*>(slots + kTableStride + 64 - 128 * half) = values[3];
    }
  }
};

// The warps that decode scales; lane l does row l % 16. All take part in every stage, whose next units'
// scales are on their way while one is decoded.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_box_scales(const MoeRowsArgs& args, char* shared, MoeRun run, const int* experts,
                                                  int decoder) {
  constexpr int kTeams = Layout::kTeams;
  int team = decoder / Layout::kTeamDecoders, row = threadIdx.x % 16;
  unsigned base = shared_address(shared);
  const float* code = reinterpret_cast<const float*>(shared + Layout::kCode);
  char* slots = shared + Layout::scale_slot(0, team * Layout::kUnitBlocks) + row % 8 * 8 + row / 8 * 4;
  decoder %= Layout::kTeamDecoders;
  int stages_left = (run.left + kTeams - 1) / kTeams;
  for (int i = 0; i < team && !run.done(); ++i) run.next(args);
  BoxScales<Layout, kNested> ahead{};
  if (!run.done()) ahead.load(args, run, experts[run.at], decoder);
  RingPosition ring;
  for (int stage = 0; stage < stages_left; ++stage) {
    BoxScales<Layout, kNested> now = ahead;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) {
      if (!run.done()) run.next(args);
    }
    if (!run.done()) ahead.load(args, run, experts[run.at], decoder);
    if (stage >= args.stages) barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    now.decode(slots + ring.stage * Layout::kDecodedStage, code, decoder);
    arrive_as_warp<Layout>(Layout::decoded(base, ring.stage));
    ring.advance(args.stages);
  }
}

}  // namespace nf4
