/* Nested scales with AVX-512: a code of 8 bits is looked up among 256 floats; static for the reason given in kernels.h. */
#pragma once

#include <immintrin.h>

#include "kernels.h"

/* The undefined vectors inside GCC 12's own intrinsics set this off. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace nf4 {
namespace {

/* The table of scales, byte by byte: two permutations find a byte of 64 scales among 256, where a gather takes 64 loads. */
struct ScaleBytes {
  float table[256];
  alignas(64) uint8_t bytes[4][256];

  /* This thread's, for a table. A model's weights share one table's values, so it is seldom made anew. */
  static const ScaleBytes& of(const float* table) {
    static thread_local ScaleBytes mine{};
    if (memcmp(mine.table, table, sizeof mine.table)) {
      memcpy(mine.table, table, sizeof mine.table);
      for (int i = 0; i < 256; ++i) {
        for (int b = 0; b < 4; ++b) mine.bytes[b][i] = (uint8_t)(float_to_bits(table[i]) >> 8 * b);
      }
    }
    return mine;
  }

  inline __m512i byte(int b, __m512i codes, __mmask64 upper) const {
    const __m512i* from = (const __m512i*)bytes[b];
    return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(from[0], codes, from[1]),
                                  _mm512_permutex2var_epi8(from[2], codes, from[3]));
  }

  /* The floats of 64 codes. */
  inline void look_up(__m512i codes, __m512 out[4]) const {
    /* Unpacking works within quarters, so four codes after four go to each of them. */
    codes = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i b0 = byte(0, codes, upper), b1 = byte(1, codes, upper);
    const __m512i b2 = byte(2, codes, upper), b3 = byte(3, codes, upper);
    const __m512i low0 = _mm512_unpacklo_epi8(b0, b1), high0 = _mm512_unpackhi_epi8(b0, b1);
    const __m512i low1 = _mm512_unpacklo_epi8(b2, b3), high1 = _mm512_unpackhi_epi8(b2, b3);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low0, low1));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low0, low1));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high0, high1));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high0, high1));
  }
};

/* out[0 .. count) = scales of blocks first ..., sixteen at a time; writes up to 15 floats behind them. */
inline void load_scales(const Nf4Weight* w, int64_t first, int64_t count, float* out) {
  if (!w->absmax_8bit) {
    memcpy(out, w->absmax + first, (size_t)count * sizeof(float));
    return;
  }
  const ScaleBytes& table = ScaleBytes::of(w->absmax_code);
  int64_t i = 0;
  while (i < count) {
    /* Up to the end of the 256 scales that share one outer scale. */
    const int64_t place = place_of(w, first + i), group = place / 256;
    int64_t stop = i + (group + 1) * 256 - place;
    if (w->group_skip) {
      /* In a shard of k, the next row's blocks are further on in the whole weight. */
      const int64_t row = w->k / w->blocksize, end = ((first + i) / row + 1) * row - first;
      if (stop > end) stop = end;
    }
    if (stop > count) stop = count;
    const __m512 outer = _mm512_set1_ps(w->absmax[group]);
    const __m512 offset = _mm512_set1_ps(w->absmax_offset[group * w->offset_stride]);
    for (; i < stop; i += 64) {
      const int64_t left = stop - i;
      const __mmask64 mask = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
      __m512 value[4];
      table.look_up(_mm512_maskz_loadu_epi8(mask, w->absmax_8bit + first + i), value);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        if (16 * v < left) _mm512_storeu_ps(out + i + 16 * v, _mm512_add_ps(_mm512_mul_ps(value[v], outer), offset));
      }
    }
    i = stop;
  }
}

}  // namespace
}  // namespace nf4
