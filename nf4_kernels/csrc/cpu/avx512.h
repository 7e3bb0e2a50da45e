/* Helpers of the AVX-512 and AMX kernel files; static for the reason given in kernels.h. */
#pragma once

#include <immintrin.h>

#include "scales_avx512.h"

namespace nf4 {

/* Scales of rows [row0, row0 + rows), one for each 64 columns, row stride k / 64. k and blocksize are multiples of
 * 64, so that no 64 columns hold two scales. */
static inline void load_scales_of_rows(const Nf4Weight* w, int64_t row0, int rows, float* out) {
  const int64_t groups = w->k / 64, wide = w->blocksize / 64;
  const int64_t first = row0 * groups, count = rows * groups;
  if (wide == 1) {
    load_scales(w, first, count, out);
    return;
  }
  float scale = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || (first + i) % wide == 0) scale = scale_of(w, (first + i) / wide);
    out[i] = scale;
  }
}

/* In-place transpose of sixteen rows of sixteen 32-bit values. */
static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
}

/* Sums of the four 128-bit quarters' lanes of four vectors: element i of `low` is the sum of v[i]'s lanes 0..7, of
 * `high` that of its lanes 8..15. */
static inline void reduce4(const __m512 v[4], __m128* low, __m128* high) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512 sum = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  *low = _mm_add_ps(_mm512_castps512_ps128(sum), _mm512_extractf32x4_ps(sum, 1));
  *high = _mm_add_ps(_mm512_extractf32x4_ps(sum, 2), _mm512_extractf32x4_ps(sum, 3));
}

/* sums[m * kUnit + r] and [m * kUnit + P + r] = the sums of total[m][r]'s lanes 0..7 and of its lanes 8..15. */
template <int M, int P>
static inline void store_pairs(const __m512 (&total)[M][P], float* sums) {
  /* Four sums at a time: P = 4 gives one token, P = 2 two of them, P = 1 four. */
  constexpr int kAtOnce = 4 / P;
#pragma GCC unroll 8
  for (int m = 0; m < M; m += kAtOnce) {
    __m512 four[4];
    __m128 low, high;
    for (int s = 0; s < kAtOnce; ++s) {
      for (int r = 0; r < P; ++r) four[s * P + r] = m + s < M ? total[m + s < M ? m + s : 0][r] : _mm512_setzero_ps();
    }
    reduce4(four, &low, &high);
    alignas(16) float a[4], b[4];
    _mm_store_ps(a, low);
    _mm_store_ps(b, high);
    for (int s = 0; s < kAtOnce && m + s < M; ++s) {
      for (int r = 0; r < P; ++r) {
        sums[(m + s) * kUnit + r] = a[s * P + r];
        sums[(m + s) * kUnit + P + r] = b[s * P + r];
      }
    }
  }
}

/* GEMMs of few tokens in float32: rows_avx512.cpp. */
void fused_order_avx512(const Prepared* x, float* order);
void fused_avx512(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums);

/* Everything but matrix tiles and fixed point; "avx512vnni" and "amx" begin with these. */
const Kernels* avx512_float32_kernels();

}  // namespace nf4
