// The prologue of linear_mma.cuh as a launch of its own: normalises each token once for all thread blocks.
#pragma once

#include "../common.cuh"

namespace nf4 {

constexpr int kNormThreads = 256;

// Writes x / root(mean of its squares + eps), rounded, times weight: a thread block for each token of k elements.
__global__ void __launch_bounds__(kNormThreads) normalise_tokens(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                                                 __nv_bfloat16* out, int k, float eps) {
  constexpr int kHeld = NF4_NORM_K / 8 / kNormThreads;
  const uint4* from = reinterpret_cast<const uint4*>(x + int64_t{blockIdx.x} * k);
  uint4 held[kHeld];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = threadIdx.x + i * kNormThreads;
    if (at * 8 >= k) break;
    held[i] = from[at];
    for (unsigned pair : {held[i].x, held[i].y, held[i].z, held[i].w}) {
      float2 both = unpack2<__nv_bfloat16>(pair);
      squares = fmaf(both.x, both.x, fmaf(both.y, both.y, squares));
    }
  }
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
  __shared__ float sums[kNormThreads / 32];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) squares += sums[i];
  float by = rsqrtf(squares / k + eps);
  uint4* to = reinterpret_cast<uint4*>(out + int64_t{blockIdx.x} * k);
  auto scaled = [&](unsigned pair, unsigned times) {
    float2 both = unpack2<__nv_bfloat16>(pair);
    return multiply_pairs(pack2<__nv_bfloat16>(both.x * by, both.y * by), times);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = threadIdx.x + i * kNormThreads;
    if (at * 8 >= k) break;
    uint4 times = reinterpret_cast<const uint4*>(weight)[at];
    to[at] = make_uint4(scaled(held[i].x, times.x), scaled(held[i].y, times.y), scaled(held[i].z, times.z),
                        scaled(held[i].w, times.w));
  }
}

// Bytes of all normalised tokens, rounded up to an aligned place behind them.
inline int64_t norm_bytes(const Nf4Linear& linear) { return (linear.m * linear.weight.k * 2 + 255) / 256 * 256; }

inline cudaError_t launch_norm(const Nf4Linear& linear, cudaStream_t stream) {
  if (linear.weight.k > NF4_NORM_K) return cudaErrorInvalidValue;
  normalise_tokens<<<static_cast<unsigned>(linear.m), kNormThreads, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(linear.x), static_cast<const __nv_bfloat16*>(linear.norm_weight),
      static_cast<__nv_bfloat16*>(linear.workspace), static_cast<int>(linear.weight.k), linear.norm_eps);
  return cudaGetLastError();
}

}  // namespace nf4
