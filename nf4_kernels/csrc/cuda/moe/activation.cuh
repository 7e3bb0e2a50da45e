// activation(gate) * up of experts, in float32.
#pragma once

#include "../common.cuh"

namespace nf4 {

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// NF4_SWIGLU_OAI is gpt-oss': gates up to 7, ups within 7 of zero, (up + 1) * gate * sigmoid(1.702 gate).
__device__ __forceinline__ float gated_activation(int activation, float gate, float up) {
  if (activation == NF4_SILU) return gate * sigmoid(gate) * up;
  if (activation == NF4_GELU_TANH) {
    // 0.5 (1 + tanh u) is sigmoid(2 u).
    return gate * sigmoid(gate * fmaf(0.07135481627f * gate, gate, 1.5957691216f)) * up;
  }
  gate = gate > 7.0f ? 7.0f : gate;
  up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
  return (up + 1.0f) * gate * sigmoid(1.702f * gate);
}

}  // namespace nf4
