// What the kernels of a mixture's router share: how values are ordered, and the choice of a row's experts by one warp.
#pragma once

#include <math.h>

#include "common.cuh"

namespace nf4 {

__device__ __forceinline__ float to_float(float value) { return value; }

// An unsigned number that orders values as torch does: NaN is the greatest, and both zeros are equal. It is never 0.
__device__ __forceinline__ unsigned rank_of(float value) {
  unsigned bits = __float_as_uint(value + 0.0f);
  if (value != value) return ~0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Finds the greatest of a warp's ranks, of which a lane has those at lane, lane + 32, ... Of equal ones it is the one with the
// lowest index. Returns its rank, and sets it to 0.
template <int kPer>
__device__ __forceinline__ unsigned take_greatest(unsigned (&ranks)[kPer], int* index) {
  int lane = threadIdx.x % 32;
  unsigned own = 0, at = lane;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (ranks[i] > own) own = ranks[i], at = lane + i * 32;
  }
  unsigned greatest = __reduce_max_sync(~0u, own);
  unsigned found = __reduce_min_sync(~0u, own == greatest ? at : ~0u);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (lane + i * 32 == static_cast<int>(found)) ranks[i] = 0;
  }
  *index = static_cast<int>(found);
  return greatest;
}

// What a router makes of logits: the k greatest of their softmax.
struct Routes {
  float* weights;  // [rows][k]
  int* experts;    // [rows][k]
  int k;           // up to 32
  bool normalised;  // the weights of a row are divided by their sum
  int rounded;      // Nf4Dtype to which weights are rounded
};

__device__ __forceinline__ float rounded_to(int dtype, float value) {
  if (dtype == NF4_FLOAT32) return value;
  return dtype == NF4_FLOAT16 ? to_float(from_float<__half>(value)) : to_float(from_float<__nv_bfloat16>(value));
}

// A warp chooses the experts of a row, of whose `width` logits a lane has those at lane, lane + 32, ... Probabilities are
// selected, as routers do it, and not the logits: what rounding has made equal comes in the order of its indices. Lane j
// keeps the j-th choice.
template <int kPer>
__device__ __forceinline__ void route_row(const Routes& routes, int64_t row, int width, float (&logits)[kPer]) {
  int lane = threadIdx.x % 32;
  float most = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) most = fmaxf(most, lane + i * 32 < width ? logits[i] : -INFINITY);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    logits[i] = lane + i * 32 < width ? expf(logits[i] - most) : 0.0f;
    sum += logits[i];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  unsigned ranks[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) ranks[i] = lane + i * 32 < width ? rank_of(__fdiv_rn(logits[i], sum)) : 0;
  float weight = 0.0f, total = 0.0f;
  int expert = 0;
  for (int j = 0; j < routes.k; ++j) {
    int found;
    // Probabilities are no less than zero; a rank of all ones is that of NaN.
    float value = __uint_as_float(take_greatest(ranks, &found) & 0x7fffffffu);
    total += value;
    if (lane == j) {
      weight = value;
      expert = found;
    }
  }
  if (lane >= routes.k) return;
  if (routes.normalised) weight = __fdiv_rn(weight, total);
  routes.weights[row * routes.k + lane] = rounded_to(routes.rounded, weight);
  routes.experts[row * routes.k + lane] = expert;
}

}  // namespace nf4
