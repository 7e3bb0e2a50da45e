// The warp of rows.cuh that reduces: it adds the sums of a team's warps and is the epilogue (bias, activation, routing weight).
#pragma once

#include "../rows/linear_rows.cuh"
#include "activation.cuh"
#include "rows_work.cuh"

namespace nf4 {

// The lane's two choices of each token tile of a group, columns 2t and 2t + 1.
__device__ __forceinline__ int2 lane_choices(const int* of_group, int tile) {
  return *reinterpret_cast<const int2*>(of_group + tile * 8 + threadIdx.x % 4 * 2);
}

// The routing weights of a unit's choices, whose loads are on their way before the unit's sums are waited for.
template <int kTiles>
struct UnitRouting {
  float2 weights[kTiles];
  __device__ __forceinline__ void load(const MoeRowsArgs& args, const int* of_group) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      weights[tile] = make_float2(1.0f, 1.0f);
      if (!args.routing) continue;
      int2 choices = lane_choices(of_group, tile);
      if (choices.x >= 0) weights[tile].x = load_fresh(args.routing + choices.x);
      if (choices.y >= 0) weights[tile].y = load_fresh(args.routing + choices.y);
    }
  }
};

// The biases of the unit's row `place` of its upper 8, and of that of its lower 8 (or of a gate and its up).
template <typename T>
__device__ __forceinline__ float2 unit_bias(const MoeRowsArgs& args, const MoeRun& run, int place, int expert) {
  float2 bias = make_float2(0.0f, 0.0f);
  if (!args.bias || run.part > 0) return bias;
  int upper = run.half * kHalfRows + place, lower = upper + (args.activation ? args.columns : kHalfRows);
  const T* from = static_cast<const T*>(args.bias) + int64_t{expert} * args.n;
  if (upper < args.columns) bias.x = to_float(from[upper]);
  if (lower < args.n) bias.y = to_float(from[lower]);
  return bias;
}

// Writes the results of gates and ups of the lane's two choices.
template <typename T>
__device__ __forceinline__ void write_gated(const MoeRowsArgs& args, int row, int2 choices, const float (&gate)[2],
                                            const float (&up)[2]) {
  // Both are computed whether they are choices or not, side by side.
  float first = gated_activation(args.activation, gate[0], up[0]), second = gated_activation(args.activation, gate[1], up[1]);
  if (row >= args.columns) return;
  T* out = static_cast<T*>(args.out) + row;
  if (choices.x >= 0) out[int64_t{choices.x} * args.columns] = from_float<T>(first);
  if (choices.y >= 0) out[int64_t{choices.y} * args.columns] = from_float<T>(second);
}

// Writes the results of a row, of the lane's two choices.
template <typename T>
__device__ __forceinline__ void write_row(const MoeRowsArgs& args, int part, int row, int2 choices, float2 routing,
                                          const float (&values)[2]) {
  if (row >= args.n) return;
  if (args.partial) {
    float* out = args.partial + part * (int64_t{args.choices} * args.n) + row;
    if (choices.x >= 0) out[int64_t{choices.x} * args.n] = routing.x * values[0];
    if (choices.y >= 0) out[int64_t{choices.y} * args.n] = routing.y * values[1];
  } else {
    T* out = static_cast<T*>(args.out) + row;
    if (choices.x >= 0) out[int64_t{choices.x} * args.n] = from_float<T>(values[0]);
    if (choices.y >= 0) out[int64_t{choices.y} * args.n] = from_float<T>(values[1]);
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

// Adds the warps' sums of a team.
template <typename Layout, int kTiles>
__device__ __forceinline__ void sum_team(const float4* from, int team, float4 (&sum)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    sum[tile] = from[(team * Layout::kTeamWarps * kTiles + tile) * 32];
#pragma unroll
    for (int warp = 1; warp < Layout::kTeamWarps; ++warp) {
      add(sum[tile], from[((team * Layout::kTeamWarps + warp) * kTiles + tile) * 32]);
    }
  }
}

// One of the warps that reduce, which take the stages in turn; where choices are added up there is one for all.
template <typename T, typename Layout, int kTiles>
__device__ __forceinline__ void reduce_units(const MoeRowsArgs& args, char* shared, MoeRun run,
                                             const HeldGroups<kTiles * 8>& held, int reducer) {
  constexpr int kSize = kTiles * 8, kWarps = Layout::kWarps, kTeams = Layout::kTeams;
  constexpr float kBy = kShrink<T>;
  unsigned base = shared_address(shared);
  int lane = threadIdx.x % 32, place = Layout::row_of(lane / 4), t = lane % 4;
  float* columns = reinterpret_cast<float*>(shared + Layout::kColumns);
  if (args.adds) {
    if (reducer > 0) return;
    for (int i = lane; i < kGroupRows * kSize; i += 32) columns[i] = 0.0f;
    __syncwarp();
    int end = min(run.last_half * kHalfRows, args.n);
    for (int row = run.half * kHalfRows; run.groups == 0 && row < end; row += kGroupRows) {
      add_choices<T, kSize>(args, columns, row, end);
    }
  } else if (!args.partial && reducer == 0) {
    zero_unknown(args.experts, args.num_experts, args.choices, static_cast<T*>(args.out), args.columns, blockIdx.x,
                 gridDim.x);
  }
  bool all = Layout::kReducers == 1 || args.adds;
  for (int stage = 0; !run.done(); ++stage) {
    int slot = stage % 2;
    if (!all && slot != reducer) {
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        if (!run.done()) run.next(args);
      }
      continue;
    }
    UnitRouting<kTiles> routing[kTeams];
    MoeRun ahead = run;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      if (ahead.done()) break;
      routing[team].load(args, held.choices_of(ahead.at));
      ahead.next(args);
    }
    barrier_wait(Layout::sums_full(base, slot), stage / 2 % 2);
    const float4* from = reinterpret_cast<const float4*>(shared + Layout::kSums) + slot * kWarps * kTiles * 32 + lane;
    float4 sums[kTeams][kTiles];
#pragma unroll
    for (int team = 0; team < kTeams; ++team) sum_team<Layout, kTiles>(from, team, sums[team]);
    // The consumers may go on before the results are written.
    arrive_as_warp<Layout>(Layout::sums_empty(base, slot));
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      if (run.done()) break;
      const int* of_group = held.choices_of(run.at);
      float2 bias = unit_bias<T>(args, run, place, held.experts[run.at]);
      int row = run.half * kHalfRows + place;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float4 sum = sums[team][tile];
        float2 weights = routing[team].weights[tile];
        int2 choices = lane_choices(of_group, tile);
        float upper[2] = {fmaf(sum.x, kBy, bias.x), fmaf(sum.y, kBy, bias.x)};
        float lower[2] = {fmaf(sum.z, kBy, bias.y), fmaf(sum.w, kBy, bias.y)};
        if (args.adds) {
          float* to = columns + place * kSize + tile * 8 + t * 2;
          if (choices.x >= 0) to[0] = weights.x * upper[0], to[kHalfRows * kSize] = weights.x * lower[0];
          if (choices.y >= 0) to[1] = weights.y * upper[1], to[kHalfRows * kSize + 1] = weights.y * lower[1];
        } else if (args.activation) {
          write_gated<T>(args, row, choices, upper, lower);
        } else {
          write_row<T>(args, run.part, row, choices, weights, upper);
          write_row<T>(args, run.part, row + kHalfRows, choices, weights, lower);
        }
      }
      if (args.adds && run.at == run.groups - 1) {
        add_choices<T, kSize>(args, columns, run.half * kHalfRows, min(run.last_half * kHalfRows, args.n));
      }
      run.next(args);
    }
  }
}

}  // namespace nf4
