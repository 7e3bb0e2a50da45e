// The launch behind a GEMM of experts that adds up each token's choices.
#pragma once

#include "args.cuh"

namespace nf4 {

struct SumArgs {
  const void* results;  // [parts][choices][n], float32 or of T (one part)
  const int* experts;
  const float* routing;  // null where float32 results are times the routing weights already
  void* out;             // [tokens][n]
  int tokens, top_k, num_experts, parts, n;
  bool wide;  // n is a multiple of 4
};

__device__ __forceinline__ float4 load_result(const float* from) {
  return load_fresh(reinterpret_cast<const float4*>(from));
}
template <typename T>
__device__ __forceinline__ float4 load_result(const T* from) {
  uint2 words = load_fresh(reinterpret_cast<const uint2*>(from));
  float2 low = unpack2<T>(words.x), high = unpack2<T>(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float one_result(const float* from) { return load_fresh(from); }
template <typename T>
__device__ __forceinline__ float one_result(const T* from) {
  return to_float(load_fresh(from));
}

// Four results of a choice, or as many as there are.
template <typename Result>
__device__ __forceinline__ float4 load_results(const SumArgs& args, const Result* from, int column) {
  if (args.wide) return load_result(from);
  float4 value;
  value.x = one_result(from);
  value.y = column + 1 < args.n ? one_result(from + 1) : 0.0f;
  value.z = column + 2 < args.n ? one_result(from + 2) : 0.0f;
  value.w = column + 3 < args.n ? one_result(from + 3) : 0.0f;
  return value;
}

// Adds in the order of the parts, and in each of the choices. A choice whose expert does not exist has no results.
template <typename T, typename Result>
__global__ void sum_choices(const __grid_constant__ SumArgs args) {
  launch_dependents();
  grid_dependency_wait();
  const Result* results = static_cast<const Result*>(args.results);
  int token = blockIdx.x, choices = args.tokens * args.top_k;
  int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (column >= args.n) return;
  constexpr int kAtOnce = 8;  // choices whose loads are on their way together
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int part = 0; part < args.parts; ++part) {
    for (int first = 0; first < args.top_k; first += kAtOnce) {
      float4 values[kAtOnce];
      float by[kAtOnce];
      bool known[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        known[j] = first + j < args.top_k;
        if (!known[j]) continue;
        int choice = token * args.top_k + first + j;
        known[j] = static_cast<unsigned>(load_fresh(args.experts + choice)) < static_cast<unsigned>(args.num_experts);
        by[j] = sizeof(Result) == 2 || args.routing ? load_fresh(args.routing + choice) : 1.0f;
        values[j] = load_results(args, results + (int64_t{part} * choices + choice) * args.n + column, column);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        sum.x += known[j] ? by[j] * values[j].x : 0.0f;
        sum.y += known[j] ? by[j] * values[j].y : 0.0f;
        sum.z += known[j] ? by[j] * values[j].z : 0.0f;
        sum.w += known[j] ? by[j] * values[j].w : 0.0f;
      }
    }
  }
  T* to = static_cast<T*>(args.out) + int64_t{token} * args.n + column;
  if (args.wide) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(sum.x, sum.y), pack2<T>(sum.z, sum.w));
    return;
  }
  to[0] = from_float<T>(sum.x);
  if (column + 1 < args.n) to[1] = from_float<T>(sum.y);
  if (column + 2 < args.n) to[2] = from_float<T>(sum.z);
  if (column + 3 < args.n) to[3] = from_float<T>(sum.w);
}

template <typename T, typename Result>
cudaError_t launch_sums(const SumArgs& args, void* stream) {
  constexpr int kThreads = 128;
  dim3 grid(static_cast<unsigned>(args.tokens), static_cast<unsigned>((args.n + kThreads * 4 - 1) / (kThreads * 4)));
  return launch_kernel(sum_choices<T, Result>, {grid, kThreads}, stream, args);
}

}  // namespace nf4
