/* GEMMs of one token in 16-bit fixed point with 512-bit vectors: what a decode step of one sequence waits for. It adds in the
 * order of rows_times() (fixed_avx512vnni.cpp), and so gives the same bits. Static for the reason given in kernels.h. */
#pragma once

#include "fixed_order_avx512.h"

namespace nf4 {
namespace {

/* Rows that are multiplied at once: row r lies in the lower half of a vector, row r + 4 in the upper. */
constexpr int kOneRows = 8;

/* kOneRows rows of w, which follow each other; the same number of rows are fetched behind them. scales: a row's groups after
 * the other's, and up to 15 floats behind the last one can be read. */
inline void one_times(const uint8_t* w, const float* scales, __m512i codes, const int16_t* x, const float* x_scales,
                      int64_t groups, float* sums) {
  const int64_t stride = groups * 32;
  const uint8_t *low = w, *high = w + 4 * stride, *next = w + kOneRows * stride;
  __m512 total[1][4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) total[0][r] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < groups; begin += 16) {
    /* Both scales of sixteen groups, from which a permutation takes those of one group. */
    __m512 scale[kOneRows];
    const __m512 x_scale = _mm512_loadu_ps(x_scales + begin);
#pragma GCC unroll 8
    for (int r = 0; r < kOneRows; ++r) scale[r] = _mm512_mul_ps(_mm512_loadu_ps(scales + r * groups + begin), x_scale);
    __m512i place = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    const int64_t end = begin + 16 < groups ? begin + 16 : groups;
    for (int64_t g = begin; g < end; ++g, low += 32, high += 32, next += 256, x += 64) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm_prefetch((const char*)next + 64 * i, _MM_HINT_T0);
      __m512i words[4] = {two_rows(low, high), two_rows(low + stride, high + stride),
                          two_rows(low + 2 * stride, high + 2 * stride), two_rows(low + 3 * stride, high + 3 * stride)};
      __m512i sum[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i columns = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(x + j * 16)));
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          if (j == 0) sum[r] = _mm512_setzero_si512();
          add_products(sum[r], _mm512_permutexvar_epi16(words[r], codes), columns);
          if (j < 3) words[r] = _mm512_srli_epi16(words[r], 4);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m512 both = _mm512_permutex2var_ps(scale[r], place, scale[r + 4]);
        total[0][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, total[0][r]);
      }
      place = _mm512_add_epi32(place, _mm512_set1_epi32(1));
    }
  }
  store_pairs<1, 4>(total, sums);
}

}  // namespace
}  // namespace nf4
