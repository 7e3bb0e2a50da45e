// The warp of rows.cuh that reduces: it adds the sums of a team's warps and is the epilogue (bias, activation, routing weight).
#pragma once

#include "../rows/linear_rows.cuh"
#include "activation.cuh"
#include "rows_work.cuh"

namespace nf4 {

// What the epilogue of a unit loads, which is on its way before the unit's sums are waited for. Lane (g, t) has rows g and
// g + 8 (or a gate and its up) of columns 2t and 2t + 1 of every token tile.
template <int kTiles>
struct UnitOperands {
  int2 choices[kTiles];
  float2 routing[kTiles], bias;
  template <typename T>
  __device__ __forceinline__ void load(const MoeRowsArgs& args, const MoeRun& run, const HeldGroups<kTiles * 8>& held) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bias = make_float2(0.0f, 0.0f);
    if (args.bias && run.part == 0) {
      int upper = run.half * kHalfRows + g, lower = upper + (args.activation ? args.columns : kHalfRows);
      const T* from = static_cast<const T*>(args.bias) + int64_t{held.experts[run.at]} * args.n;
      if (upper < args.columns) bias.x = to_float(from[upper]);
      if (lower < args.n) bias.y = to_float(from[lower]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      choices[tile] = *reinterpret_cast<const int2*>(held.choices_of(run.at) + tile * 8 + t * 2);
      routing[tile] = make_float2(1.0f, 1.0f);
      if (!args.routing) continue;
      if (choices[tile].x >= 0) routing[tile].x = load_fresh(args.routing + choices[tile].x);
      if (choices[tile].y >= 0) routing[tile].y = load_fresh(args.routing + choices[tile].y);
    }
  }
};

// Writes the results of two rows (or of a gate and its up) of one choice.
template <typename T>
__device__ __forceinline__ void write_unit(const MoeRowsArgs& args, const MoeRun& run, int choice, float routing,
                                           float upper, float lower) {
  int row = run.half * kHalfRows + threadIdx.x % 32 / 4;
  if (args.activation) {
    if (row >= args.columns) return;
    static_cast<T*>(args.out)[int64_t{choice} * args.columns + row] =
        from_float<T>(gated_activation(args.activation, upper, lower));
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half, row += kHalfRows) {
    if (row >= args.n) return;
    float value = half ? lower : upper;
    int64_t at = int64_t{choice} * args.n + row;
    if (args.partial) {
      args.partial[run.part * (int64_t{args.choices} * args.n) + at] = routing * value;
    } else {
      static_cast<T*>(args.out)[at] = from_float<T>(value);
    }
  }
}

// Adds up each token's choices of a row group, whose results are in shared memory as [row][column], and clears them.
template <typename T, int kSize>
__device__ __forceinline__ void add_choices(const MoeRowsArgs& args, float* columns, int first_row, int end_row) {
  __syncwarp();
  for (int i = threadIdx.x % 32; i < kGroupRows * args.tokens; i += 32) {
    int row = i % kGroupRows, token = i / kGroupRows;
    const float* from = columns + row * kSize + token * args.top_k;
    float sum = 0.0f;
    for (int j = 0; j < args.top_k; ++j) sum += from[j];
    if (first_row + row < end_row) {
      static_cast<T*>(args.out)[int64_t{token} * args.n + first_row + row] = from_float<T>(sum);
    }
  }
  __syncwarp();
  for (int i = threadIdx.x % 32; i < kGroupRows * kSize; i += 32) columns[i] = 0.0f;
  __syncwarp();
}

template <typename T, typename Layout, int kTiles>
__device__ __forceinline__ void reduce_units(const MoeRowsArgs& args, char* shared, MoeRun run,
                                             const HeldGroups<kTiles * 8>& held) {
  constexpr int kSize = kTiles * 8, kWarps = Layout::kWarps;
  constexpr float kBy = kShrink<T>;
  unsigned base = shared_address(shared);
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* columns = reinterpret_cast<float*>(shared + Layout::kColumns);
  if (args.adds) {
    for (int i = lane; i < kGroupRows * kSize; i += 32) columns[i] = 0.0f;
    __syncwarp();
    int end = min(run.last_half * kHalfRows, args.n);
    for (int row = run.half * kHalfRows; run.groups == 0 && row < end; row += kGroupRows) {
      add_choices<T, kSize>(args, columns, row, end);
    }
  } else if (!args.partial) {
    zero_unknown(args.experts, args.num_experts, args.choices, static_cast<T*>(args.out), args.columns, blockIdx.x,
                 gridDim.x);
  }
  RingPosition sums;
  while (!run.done()) {
    bool waited = false;
    const float4* from =
        reinterpret_cast<const float4*>(shared + Layout::kSums) + sums.stage * kWarps * kTiles * 32 + lane;
#pragma unroll 1
    for (int team = 0; team < Layout::kTeams && !run.done(); ++team, run.next(args)) {
      UnitOperands<kTiles> operands;
      operands.template load<T>(args, run, held);
      if (!waited) barrier_wait(Layout::sums_full(base, sums.stage), sums.parity);
      waited = true;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float4 sum = from[(team * Layout::kTeamWarps * kTiles + tile) * 32];
#pragma unroll
        for (int warp = 1; warp < Layout::kTeamWarps; ++warp) {
          add(sum, from[((team * Layout::kTeamWarps + warp) * kTiles + tile) * 32]);
        }
        float2 bias = operands.bias, routing = operands.routing[tile];
        int2 choices = operands.choices[tile];
        float upper[2] = {fmaf(sum.x, kBy, bias.x), fmaf(sum.y, kBy, bias.x)};
        float lower[2] = {fmaf(sum.z, kBy, bias.y), fmaf(sum.w, kBy, bias.y)};
        if (args.adds) {
          float* to = columns + g * kSize + tile * 8 + t * 2;
          if (choices.x >= 0) to[0] = routing.x * upper[0], to[kHalfRows * kSize] = routing.x * lower[0];
          if (choices.y >= 0) to[1] = routing.y * upper[1], to[kHalfRows * kSize + 1] = routing.y * lower[1];
        } else {
          if (choices.x >= 0) write_unit<T>(args, run, choices.x, routing.x, upper[0], lower[0]);
          if (choices.y >= 0) write_unit<T>(args, run, choices.y, routing.y, upper[1], lower[1]);
        }
      }
      if (args.adds && run.at == run.groups - 1) {
        add_choices<T, kSize>(args, columns, run.half * kHalfRows, min(run.last_half * kHalfRows, args.n));
      }
    }
    barrier_arrive(Layout::sums_empty(base, sums.stage));
    sums.advance(2);
  }
}

}  // namespace nf4
