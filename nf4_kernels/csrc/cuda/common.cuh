// What every CUDA kernel here shares: the codebook, how a scale is read, conversions to the output types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "params.h"

#define NF4_EXPORT extern "C" __attribute__((visibility("default")))

#define NF4_CODEBOOK                                                                                         \
  -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, \
  -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, \
  0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, \
  0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

namespace nf4 {

__device__ __constant__ const float kCodebook[16] = {NF4_CODEBOOK};

// Codes that are rounded to 16 bit before they are scaled are stretched first, and the sums are shrunk in float32. Weights
// drawn from a normal distribution then carry a relative error of 0.8e-3 in bfloat16, and 1.4e-3 without. Every weight of
// one code is off by the same amount, so this error does not average out over a row as rounding does.
constexpr float kStretch = 1.4363999f;
template <typename T>
constexpr float kShrink = 0.69618943f;
template <>
constexpr float kShrink<__nv_bfloat16> = 0.69603348f;

// A scale from its 8-bit code. Every operation is rounded by itself, as bitsandbytes does it in two launches.
__device__ __forceinline__ float nested_scale(float code, float absmax, float offset) {
  return __fadd_rn(__fmul_rn(code, absmax), offset);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ float2 to_floats(__half, unsigned pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
__device__ __forceinline__ float2 to_floats(__nv_bfloat16, unsigned pair) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}

// Two T of a register as floats, the low half first.
template <typename T>
__device__ __forceinline__ float2 unpack2(unsigned pair) {
  return to_floats(T{}, pair);
}

// Loads what the kernel in front may have written while this one had already started: from L2, never an older copy.
template <typename T>
__device__ __forceinline__ T load_fresh(const T* from) {
  return __ldcg(from);
}

// Two floats as one register of two T, the first in the low half.
template <typename T>
__device__ __forceinline__ unsigned pack2(float low, float high);
template <>
__device__ __forceinline__ unsigned pack2<__half>(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}
template <>
__device__ __forceinline__ unsigned pack2<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}

// Multiplies two pairs of bfloat16 and rounds each result.
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
  __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<unsigned*>(&product);
}

inline int log2_of(int64_t power_of_two) {
  int bits = 0;
  while ((int64_t{1} << bits) < power_of_two) ++bits;
  return bits;
}

}  // namespace nf4
