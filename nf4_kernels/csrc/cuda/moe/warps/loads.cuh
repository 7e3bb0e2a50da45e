// The loads of moe_warps: each warp copies the codes of its steps into its own ring of stages, and loads scales to registers.
#pragma once

#include "../../rows/linear_rows.cuh"
#include "layout.cuh"

namespace nf4 {

__device__ __forceinline__ void copy_16(unsigned target, const void* source, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void commit_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last kPending stages that were committed are there.
template <int kPending>
__device__ __forceinline__ void wait_stages() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Goes through a warp's steps ahead of their multiplication. Eight lanes copy 128 bytes of a row, whose 16-byte chunks are
// swapped so that the lanes of a half warp, which read four rows, find them in different banks.
template <typename Layout>
struct StepLoads {
  static constexpr int kRowTiles = Layout::kRowTiles;
  WarpUnits unit;
  int step = 0;
  const char* codes;             // of the expert, at this lane's chunk
  unsigned rows[kRowTiles * 4];  // bytes from there to the lane's rows; beyond the last row it is that
  unsigned target;
  uint64_t policy;
  const int* experts;

  __device__ __forceinline__ StepLoads(const MoeWarpsArgs& args, unsigned base, const WarpUnits& units, const int* experts)
      : unit(units), experts(experts) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 8;
    target = base + Layout::kRing + warp * Layout::kWarpBytes + row * 128 + ((lane % 8 ^ 2 * row) << 4);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if (unit.left > 0) begin_unit(args);
  }
  __device__ __forceinline__ void begin_unit(const MoeWarpsArgs& args) {
    int lane = threadIdx.x % 32, expert = experts[unit.at()], first = unit.row_group() * Layout::kRows;
    unsigned row_bytes = args.k_blocks * 32;
    codes = reinterpret_cast<const char*>(args.weight.packed) + int64_t{expert} * args.n * row_bytes + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < kRowTiles * 4; ++i) rows[i] = min(first + i * 4 + lane / 8, args.n - 1) * row_bytes;
    // The scales are loaded when the unit is multiplied, and should be in a cache by then.
    if (lane >= Layout::kRows) return;
    unsigned block = (expert * args.n + min(first + lane, args.n - 1)) * args.k_blocks;
    if (Layout::kNested) {
      prefetch_line(args.weight.absmax_8bit + block);
      if (lane % 8 == 0) prefetch_line(args.weight.absmax + block / 256);
    } else {
      prefetch_line(args.weight.absmax + block);
    }
  }
  // Starts the copies of the next step to a stage. Where no step is left, the stage stays as it is.
  __device__ __forceinline__ void issue(const MoeWarpsArgs& args, int stage) {
    if (unit.left > 0) {
#pragma unroll
      for (int i = 0; i < kRowTiles * 4; ++i) {
        copy_16(target + stage * Layout::kStageBytes + i * 512, codes + (rows[i] + step * 128), policy);
      }
      if (++step == args.steps) {
        step = 0;
        unit.next();
        if (unit.left > 0) begin_unit(args);
      }
    }
    commit_stage();
  }
};

// The scales of one row of a unit. Of nested scales lane t of the row's four has every fourth word, which is the four k blocks
// of a step; of plain ones it has those of k block t of each step.
template <bool kNested>
struct RowOfScales {
  unsigned first;      // the row's first k block, of all experts'
  unsigned now, then;  // words (or floats) of the current four steps (or step), and of the next
  float2 outer;        // the second-level scale and its offset
  int change;          // the step from which on there is another one

  __device__ __forceinline__ unsigned load(const MoeWarpsArgs& args, int step) const {
    int t = threadIdx.x % 4;
    if (kNested) {
      const uint8_t* from = args.weight.absmax_8bit + first + (step + t) * kStepBlocks;
      return step + t < args.steps ? __ldg(reinterpret_cast<const unsigned*>(from)) : 0;
    }
    return step < args.steps ? __float_as_uint(__ldg(args.weight.absmax + first + step * kStepBlocks + t)) : 0;
  }
  __device__ __forceinline__ void begin(const MoeWarpsArgs& args, unsigned first_block) {
    first = first_block;
    if (kNested) {
      outer = outer_scale(args.weight, first / 256);
      change = static_cast<int>(256 - first % 256) / kStepBlocks;
    }
    now = load(args, 0);
    then = load(args, kNested ? 4 : 1);
  }
  // The scale of k block t of a step. Steps come one after another.
  __device__ __forceinline__ float of(const MoeWarpsArgs& args, const float* code, int step) {
    float value;
    if constexpr (kNested) {
      if (step == change) {
        outer = outer_scale(args.weight, (first + step * kStepBlocks) / 256);
        change += 256 / kStepBlocks;
      }
      unsigned word = __shfl_sync(~0u, now, threadIdx.x % 32 / 4 * 4 + step % 4);
      value = nested_scale(code[word >> threadIdx.x % 4 * 8 & 255], outer.x, outer.y);
      if (step % 4 < 3) return value;
    } else {
      value = __uint_as_float(now);
    }
    now = then;
    then = load(args, step + (kNested ? 5 : 2));
    return value;
  }
};

}  // namespace nf4
