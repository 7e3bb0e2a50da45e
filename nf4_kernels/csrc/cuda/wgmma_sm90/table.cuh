// The table that turns a byte, which is two codes, into one of linear_wgmma.cuh's A registers.
#pragma once

#include "layout.cuh"

namespace nf4 {

// Float16 codes that are scaled before they are rounded to bfloat16 are stretched by this, so that they are off by 0.6e-4
// (the rounding then adds 1.7e-3). Codes that are rounded to float16 are floats instead, whose lookups take twice as long.
constexpr float kHalfStretch = 1.6776895f;

// Fills all 32 copies of the table; a warp fills 16 entries at a time. Entries are pairs of T, or where weights are scaled
// before they are rounded, of float16 or float.
template <typename Traits>
__device__ __forceinline__ void fill_table(char* shared, int warp) {
  using T = typename Traits::T;
  constexpr int kStride = WgmmaLayout<Traits>::kTableStride;
  constexpr float codes[16] = {NF4_CODEBOOK};
  for (int first = warp; first < 16; first += Traits::kConsumerWarps) {
    float high = codes[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
    char* target = shared + first * 16 * kStride + threadIdx.x % 32 * Traits::kPairBytes;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (Traits::kScaledWeights && Traits::kHalfCodes) {
        *reinterpret_cast<__half2*>(target + i * kStride) =
            __floats2half2_rn(high * kHalfStretch, codes[i] * kHalfStretch);
      } else if constexpr (Traits::kScaledWeights) {
        *reinterpret_cast<float2*>(target + i * kStride) = make_float2(high, codes[i]);
      } else {
        *reinterpret_cast<unsigned*>(target + i * kStride) = pack2<T>(high * kStretch, codes[i] * kStretch);
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

// The same from a table of pairs that are scaled later. It is volatile so that lookups stay in front of the wgmma that
// follows them in the source.
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
