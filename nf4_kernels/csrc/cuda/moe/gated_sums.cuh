// The launch behind a GEMM of gates and ups whose k is in parts: it adds each choice's parts up and computes the activation.
#pragma once

#include "activation.cuh"
#include "sums.cuh"

namespace nf4 {

__device__ __forceinline__ void add_to(float4& sum, float4 value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// sums.out is [choices][n / 2]: sums.tokens are choices, whose results [parts][choices][n] have n / 2 gates, then their ups. A
// choice whose expert does not exist gives zeros.
template <typename T>
__global__ void sum_gated(const __grid_constant__ SumArgs sums, int activation, int choice_blocks) {
  launch_dependents();
  grid_dependency_wait();
  int choice = blockIdx.x / choice_blocks, columns = sums.n / 2;
  int column = (blockIdx.x % choice_blocks * blockDim.x + threadIdx.x) * 4;
  if (column >= columns) return;
  float4 gate = make_float4(0.0f, 0.0f, 0.0f, 0.0f), up = gate;
  if (static_cast<unsigned>(load_fresh(sums.experts + choice)) < static_cast<unsigned>(sums.num_experts)) {
    const float* from = static_cast<const float*>(sums.results) + int64_t{choice} * sums.n + column;
    for (int part = 0; part < sums.parts; ++part, from += int64_t{sums.tokens} * sums.n) {
      add_to(gate, load_results(sums, from, column));
      add_to(up, load_results(sums, from + columns, columns + column));
    }
  }
  float values[4] = {gated_activation(activation, gate.x, up.x), gated_activation(activation, gate.y, up.y),
                     gated_activation(activation, gate.z, up.z), gated_activation(activation, gate.w, up.w)};
  T* to = static_cast<T*>(sums.out) + int64_t{choice} * columns + column;
  if (sums.wide) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]));
    return;
  }
  for (int i = 0; i < 4 && column + i < columns; ++i) to[i] = from_float<T>(values[i]);
}

template <typename T>
cudaError_t launch_gated_sums(const SumArgs& sums, int activation, void* stream) {
  constexpr int kThreads = 128;
  int blocks = (sums.n / 2 + kThreads * 4 - 1) / (kThreads * 4);
  return launch_kernel(sum_gated<T>, {sums.tokens * blocks, kThreads}, stream, sums, activation, blocks);
}

}  // namespace nf4
