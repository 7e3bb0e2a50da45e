/* Helpers of the AVX2 kernel files; static for the reason given in kernels.h. */
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace nf4 {

static inline float sum8(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* In-place transpose of eight rows of eight floats. */
static inline void transpose8(__m256 r[8]) {
  __m256 t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

/* Scales of rows [row0, row0 + rows) times unit, one for each 64 columns, row stride k / 64. k and blocksize are multiples of
 * 64. */
static inline void scales_of_rows(const Nf4Weight* w, int64_t row0, int rows, float unit, float* out) {
  const int64_t wide = w->blocksize / 64, groups = w->k / 64, first = row0 * groups, count = rows * groups;
  if (wide > 1 || w->group_skip) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = i && (first + i) % wide ? out[i - 1] : scale_of(w, (first + i) / wide) * unit;
    }
    return;
  }
  if (!w->absmax_8bit) {
    for (int64_t i = 0; i < count; ++i) out[i] = w->absmax[first + i] * unit;
    return;
  }
  for (int64_t i = 0; i < count;) {
    /* Up to the end of the 256 scales that share one outer scale. */
    const int64_t place = w->group_offset + first + i, group = place / 256, left = (group + 1) * 256 - place;
    const int64_t stop = left < count - i ? i + left : count;
    const float outer = w->absmax[group], offset = w->absmax_offset[group * w->offset_stride];
    const uint8_t* codes = w->absmax_8bit + first;
    for (; i < stop; ++i) out[i] = (w->absmax_code[codes[i]] * outer + offset) * unit;
  }
}

/* The GEMMs in fixed point: sets the functions of `fused` and `tiles`. */
void use_fixed_avx2(Kernels* kernels);

}  // namespace nf4
