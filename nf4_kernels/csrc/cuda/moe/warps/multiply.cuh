// The multiplication of a step of moe_warps, and the epilogue of a unit.
#pragma once

#include "loads.cuh"

namespace nf4 {

// A lane's part of a unit: rows g and g + 8 of each row tile; columns 2t and 2t + 1 of the group's eight choices.
template <typename T, typename Layout>
struct UnitSums {
  static constexpr int kRowTiles = Layout::kRowTiles;
  const T* x;  // the activations of the choice of column g, at 16t
  RowOfScales<Layout::kNested> scales[kRowTiles][2];
  int2 choices;  // of the lane's columns
  float2 routing;
  float sums[kRowTiles][1][4];

  __device__ __forceinline__ void begin(const MoeWarpsArgs& args, const WarpUnits& unit,
                                        const HeldGroups<Layout::kSize>& held) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int* of_group = held.choices_of(unit.at());
    // A column without a choice repeats the first one; its results are not written.
    int choice = of_group[g];
    if (choice < 0) choice = of_group[0];
    x = static_cast<const T*>(args.x) + int64_t{choice / args.x_choices} * args.k + t * 16;
    choices = *reinterpret_cast<const int2*>(of_group + t * 2);
    routing = make_float2(1.0f, 1.0f);
    if (args.routing) {
      if (choices.x >= 0) routing.x = load_fresh(args.routing + choices.x);
      if (choices.y >= 0) routing.y = load_fresh(args.routing + choices.y);
    }
    int expert_row = held.experts[unit.at()] * args.n, first = unit.row_group() * Layout::kRows + g;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned row = expert_row + min(first + i * 16 + half * 8, args.n - 1);
        scales[i][half].begin(args, row * args.k_blocks);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][0][j] = 0.0f;
    }
  }
  // Adds a step's products. codes: the stage, at the lane's rows; offsets: of the lane's codes of each k block.
  __device__ __forceinline__ void add_step(const MoeWarpsArgs& args, const float* code, const char* codes, int step,
                                           const int (&offsets)[kStepBlocks]) {
    int lane = threadIdx.x % 32;
    unsigned lane_offset = lane * 4;
    float mine[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) mine[i][half] = scales[i][half].of(args, code, step);
    }
#pragma unroll
    for (int j = 0; j < kStepBlocks; ++j) {
      // These are no __ldg, since the kernel in front may write them after this one has started.
      const uint4* from = reinterpret_cast<const uint4*>(x + (step * kStepBlocks + j) * 64);
      uint4 b[1][2] = {{from[0], from[1]}};
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint2 upper = *reinterpret_cast<const uint2*>(codes + i * 2048 + offsets[j]);
        uint2 lower = *reinterpret_cast<const uint2*>(codes + i * 2048 + 1024 + offsets[j]);
        float part[1][4] = {};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          unsigned a[4];
          decode_codes(a, upper, lower, s, lane_offset, true, true);
          mma_step<T>(part, a, b, s);
        }
        float by_upper = __shfl_sync(~0u, mine[i][0], lane / 4 * 4 + j);
        float by_lower = __shfl_sync(~0u, mine[i][1], lane / 4 * 4 + j);
        sums[i][0][0] += by_upper * part[0][0];
        sums[i][0][1] += by_upper * part[0][1];
        sums[i][0][2] += by_lower * part[0][2];
        sums[i][0][3] += by_lower * part[0][3];
      }
    }
  }
  // Writes the result of one row and choice. added: where the thread block adds up choices, those of the row.
  __device__ __forceinline__ void write(const MoeWarpsArgs& args, int row, int choice, float by, float value,
                                        float* added) const {
    if (choice < 0 || row >= args.n) return;
    int64_t at = int64_t{choice} * args.n + row;
    if (args.adds) {
      added[choice * Layout::kRows] = by * value;
    } else if (args.partial) {
      args.partial[at] = by * value;
    } else {
      static_cast<T*>(args.out)[at] = from_float<T>(value);
    }
  }
  // Bias and routing weights. added: where the thread block adds up choices, [choice][row] of the unit's rows.
  __device__ __forceinline__ void finish(const MoeWarpsArgs& args, const WarpUnits& unit, int expert, float* added) const {
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int place = i * 16 + half * 8 + g, row = unit.row_group() * Layout::kRows + place;
        float bias = 0.0f;
        if (args.bias && row < args.n) bias = to_float(static_cast<const T*>(args.bias)[int64_t{expert} * args.n + row]);
        const float* two = sums[i][0] + half * 2;
        write(args, row, choices.x, routing.x, fmaf(two[0], kShrink<T>, bias), added + place);
        write(args, row, choices.y, routing.y, fmaf(two[1], kShrink<T>, bias), added + place);
      }
    }
  }
};

}  // namespace nf4
