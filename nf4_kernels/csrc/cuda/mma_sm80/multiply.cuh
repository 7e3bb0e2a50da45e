// What linear_mma.cuh and whole/ share: the products of 64 k.
#pragma once

#include "../mma.cuh"
#include "table.cuh"

namespace nf4 {

// Multiplies 64 k, in blocks of some token tiles and 16 k; between(block) runs after each. operands: the A registers of each m16
// tile, for four times 16 k. factor: by row, what its sums are multiplied by; or, if kRescales, those before them, since sums are
// in units of the latest scale then and need no registers of their own.
template <typename T, typename Shape, bool kRescales, typename Between>
__device__ __forceinline__ void multiply_step(float (&acc)[Shape::kRowTiles][Shape::kTiles][4],
                                              const unsigned (&operands)[Shape::kRowTiles][4][4], unsigned activations,
                                              const float (&factor)[Shape::kRowTiles * 2], Between between) {
  constexpr int kRowTiles = Shape::kRowTiles, kGroup = Shape::kGroup;
  unsigned neighbours = activations ^ 16;
#pragma unroll
  for (int first = 0; first < Shape::kTiles; first += kGroup) {
    float sum[kGroup][kRowTiles][4];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][i][e] = kRescales ? acc[i][first + j][e] * factor[i * 2 + e / 2] : 0.0f;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        b[j] = load_operand((half ? neighbours : activations) + (first + j) * 8 * kTableStride);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            mma<T>(sum[j][i], operands[i][half * 2 + s], s ? b[j].z : b[j].x, s ? b[j].w : b[j].y, sum[j][i]);
          }
        }
        between(first / kGroup * 4 + half * 2 + s);
      }
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& to = acc[i][first + j][e];
          to = kRescales ? sum[j][i][e] : to + sum[j][i][e] * factor[i * 2 + e / 2];
        }
      }
    }
  }
}

}  // namespace nf4
