// A warp's softmax over KV blocks: scores, probabilities and their sums of values, on matrix instructions.
#pragma once

#include "../mma.cuh"
#include "queries.cuh"

namespace nf4 {
namespace attention {

constexpr float kLeast = -1e38f;  // below every score

__device__ __forceinline__ float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Sums over keys, for 8 heads. A lane has heads 2 (lane % 4) and the next; of each 16 elements of a head it has elements
// lane / 4 and lane / 4 + 8. Its weights are those of its own keys.
struct Sums {
  float values[kSteps][4];  // elements lane / 4 of both heads, then elements lane / 4 + 8
  float greatest[2], weights[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i][j] = 0.0f;
    }
    greatest[0] = greatest[1] = kLeast;
    weights[0] = weights[1] = 0.0f;
  }

  // Adds a KV block in shared memory, of whose keys [first, last) are seen. scale is that of scores, times log2(e).
  template <typename T>
  __device__ __forceinline__ void add(unsigned stage, const unsigned (&queries)[kSteps][2], float scale, int first,
                                      int last) {
    int lane = threadIdx.x % 32, key = lane / 4;
    float score[2][4] = {};
    unsigned operands[4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_matrices(operands, stage + place_of(lane % 16, 2 * i + lane / 16));
      mma<T>(score[i % 2], operands, queries[i][0], queries[i][1], score[i % 2]);
    }
    bool seen[2] = {key >= first && key < last, key + 8 >= first && key + 8 < last};
#pragma unroll
    for (int i = 0; i < 4; ++i) score[0][i] = seen[i / 2] ? (score[0][i] + score[1][i]) * scale : -INFINITY;
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(score[0][i], score[0][i + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      most = fmaxf(most, greatest[i]);
      shrink[i] = exp2_of(greatest[i] - most);
      greatest[i] = most;
    }
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2_of(score[0][i] - greatest[i % 2]);
#pragma unroll
    for (int i = 0; i < 2; ++i) weights[i] = weights[i] * shrink[i] + p[i] + p[i + 2];
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[i][j] *= shrink[j % 2];
      }
    }
    unsigned probabilities[2] = {transposed(pack2<T>(p[0], p[1])), transposed(pack2<T>(p[2], p[3]))};
    unsigned row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_transposed(operands, stage + kHalfBytes + place_of(row, 2 * i + chunk));
      mma<T>(values[i], operands, probabilities[0], probabilities[1], values[i]);
    }
  }
};

}  // namespace attention
}  // namespace nf4
