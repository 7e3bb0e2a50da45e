// The table that turns a byte, two codes, into one of linear_wgmma.cuh's A registers.
#pragma once

#include <type_traits>

#include "wgmma_layout.cuh"

namespace nf4 {

// Weights that are scaled before they are rounded: to bfloat16 they are made of codes in float16, so stretched that they
// are off by 0.6e-4 (rounding then adds 1.7e-3); to float16, of floats, whose lookups take twice as long.
constexpr float kHalfStretch = 1.6776895f;
template <typename T>
constexpr bool kOfHalves = std::is_same_v<T, __nv_bfloat16>;

// All 32 copies of the table, 16 entries a turn: pairs of T, or for weights that are scaled first, of float16 or floats.
template <typename T, bool kScaledFirst>
__device__ __forceinline__ void fill_table(char* shared, int warp, int warps, int stride) {
  constexpr float codes[16] = {NF4_CODEBOOK};
  for (int first = warp; first < 16; first += warps) {
    float high = codes[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
    char* target = shared + first * 16 * stride + threadIdx.x % 32 * (kScaledFirst && !kOfHalves<T> ? 8 : 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (kScaledFirst && kOfHalves<T>) {
        *reinterpret_cast<__half2*>(target + i * stride) =
            __floats2half2_rn(high * kHalfStretch, codes[i] * kHalfStretch);
      } else if constexpr (kScaledFirst) {
        *reinterpret_cast<float2*>(target + i * stride) = make_float2(high, codes[i]);
      } else {
        *reinterpret_cast<unsigned*>(target + i * stride) = pack2<T>(high * kStretch, codes[i] * kStretch);
      }
    }
  }
}

// The A register of one byte: its entry in this lane's copy of the table.
__device__ __forceinline__ unsigned table_entry(unsigned word, int byte, unsigned lane_offset) {
  unsigned pair;
  asm("ld.shared.b32 %0, [%1 + %2];"
      : "=r"(pair)
      : "r"(__byte_perm(word, lane_offset, 0x5504 | byte << 4)), "n"(kTableBase));
  return pair;
}

// The same from a table of pairs that are scaled later. Volatile: lookups stay in front of the products.
__device__ __forceinline__ void table_pair(__half2& pair, unsigned word, int byte, unsigned lane_offset) {
  asm volatile("ld.shared.b32 %0, [%1 + %2];"
               : "=r"(reinterpret_cast<unsigned&>(pair))
               : "r"(__byte_perm(word, lane_offset, 0x5504 | byte << 4)), "n"(kTableBase));
}
__device__ __forceinline__ void table_pair(float2& pair, unsigned word, int byte, unsigned lane_offset) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(__byte_perm(word, lane_offset, 0x5504 | byte << 4)), "n"(kTableBase));
}
__device__ __forceinline__ float2 as_floats(float2 pair) { return pair; }
__device__ __forceinline__ float2 as_floats(__half2 pair) { return __half22float2(pair); }

}  // namespace nf4
