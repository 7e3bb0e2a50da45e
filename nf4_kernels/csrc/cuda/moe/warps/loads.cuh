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
__device__ __forceinline__ uint2 load_shared(unsigned address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
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
    asm volatile("" : "+r"(target));  // otherwise the compiler computes it again for each step
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
  // Starts the copies of the next step to a stage. Where no step is left, the stage stays as it is, and so do places of it
  // beyond k.
  __device__ __forceinline__ void issue(const MoeWarpsArgs& args, int stage) {
    if (unit.left > 0) {
      if (Layout::kWhole || step * 128 + static_cast<int>(threadIdx.x % 8) * 16 < args.k_blocks * 32) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) {
          copy_16(target + stage * Layout::kStageBytes + i * 512, codes + (rows[i] + step * 128), policy);
        }
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

// The scales of one row of a unit: lane t of the row's four has those of step t. Where k is whole steps, they lie in one group
// of 256, and four of them are one load.
template <bool kNested, bool kWhole>
struct RowOfScales {
  using Four = std::conditional_t<kNested, unsigned, float4>;
  Four raw;
  float2 outer;   // of nested scales: the second-level scale and its offset
  float2 behind;  // those from scale `change` of the step on, where k is not whole steps
  int change;
  float values[kStepBlocks];

  __device__ __forceinline__ void load(const MoeWarpsArgs& args, unsigned first_block) {
    int t = threadIdx.x % 4;
    if (t >= args.steps) return;
    unsigned block = first_block + t * kStepBlocks;
    if constexpr (!kWhole) {
      load_each(args, block, min(kStepBlocks, args.k_blocks - t * kStepBlocks));
    } else if constexpr (kNested) {
      raw = __ldg(reinterpret_cast<const unsigned*>(args.weight.absmax_8bit + block));
      outer = outer_scale(args.weight, block / 256);
    } else {
      raw = __ldg(reinterpret_cast<const float4*>(args.weight.absmax + block));
    }
  }
  // The same of the first `count` scales of a step; the others count nothing, as their activations are zeros.
  __device__ __forceinline__ void load_each(const MoeWarpsArgs& args, unsigned block, int count) {
    if constexpr (kNested) {
      raw = 0;
#pragma unroll
      for (int j = 0; j < kStepBlocks; ++j) {
        if (j < count) raw |= static_cast<unsigned>(__ldg(args.weight.absmax_8bit + block + j)) << (8 * j);
      }
      outer = outer_scale(args.weight, block / 256);
      behind = outer_scale(args.weight, (block + count - 1) / 256);
      change = static_cast<int>(256 - block % 256);
    } else {
      const float* from = args.weight.absmax + block;
      raw = make_float4(__ldg(from), count > 1 ? __ldg(from + 1) : 0.0f, count > 2 ? __ldg(from + 2) : 0.0f,
                        count > 3 ? __ldg(from + 3) : 0.0f);
    }
  }
  // Lanes without a step decode what they last had.
  __device__ __forceinline__ void decode(const float* code) {
    if constexpr (kNested) {
#pragma unroll
      for (int j = 0; j < kStepBlocks; ++j) {
        float2 by = kWhole || j < change ? outer : behind;
        values[j] = nested_scale(code[raw >> (8 * j) & 255], by.x, by.y);
      }
    } else {
      values[0] = raw.x;
      values[1] = raw.y;
      values[2] = raw.z;
      values[3] = raw.w;
    }
  }
  // That of k block j of a step.
  __device__ __forceinline__ float of(int step, int j) const {
    return __shfl_sync(~0u, values[j], threadIdx.x % 32 / 4 * 4 + step);
  }
};

}  // namespace nf4
