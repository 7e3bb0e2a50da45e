/* Codes and columns as the GEMMs in fixed point with 512-bit vectors take them; static for the reason given in kernels.h. */
#pragma once

#include "avx512.h"
#include "fixed.h"

namespace nf4 {
namespace {

/* Sixteen words hold the 64 codes of a row, and a vector those of two rows, A and B. Nibble j of a word is a code: vpermw
 * looks it up by the word's low bits, and a shift by four brings the next one there. Word w, nibble j is column
 * 4 w + (j ^ 1) of 64, so columns come as four times sixteen integers, and x is put in that order once. */

/* The integers of the codes, twice: vpermw reads a fifth bit, which is the next code's. */
inline __m512i code_words(const Nf4Weight* w) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)fixed_codes_of(w)));
}

/* Adds the products of a's and b's pairs of 16-bit integers to sum's. GCC 12 copies every sum around the intrinsic for this. */
inline void add_products(__m512i& sum, __m512i a, __m512i b) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

inline __m512i two_rows(const uint8_t* a, const uint8_t* b) {
  const __m256i low = _mm256_loadu_si256((const __m256i*)a), high = _mm256_loadu_si256((const __m256i*)b);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* x's 64 columns as integers in that order, 32 a vector; returns their scale. */
struct ColumnOrder {
  __m512i first, second;
  ColumnOrder() {
    alignas(64) int16_t columns[64];
    for (int i = 0; i < 64; ++i) columns[i] = (int16_t)(4 * (i % 16) + (i / 16 ^ 1));
    first = _mm512_load_si512(columns);
    second = _mm512_load_si512(columns + 32);
  }

  inline float order(const float* x, __m512i to[2]) const {
    __m512 part[4], magnitude[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      part[i] = _mm512_loadu_ps(x + 16 * i);
      magnitude[i] = _mm512_abs_ps(part[i]);
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(magnitude[0], magnitude[1]), _mm512_add_ps(magnitude[2], magnitude[3]));
    const __m512 most = _mm512_max_ps(_mm512_max_ps(magnitude[0], magnitude[1]), _mm512_max_ps(magnitude[2], magnitude[3]));
    float inverse;
    const float scale = fixed_scale(_mm512_reduce_add_ps(sum), _mm512_reduce_max_ps(most), &inverse);
    __m256i words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      words[i] = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(part[i], _mm512_set1_ps(inverse))));
    }
    const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(words[0]), words[1], 1);
    const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(words[2]), words[3], 1);
    to[0] = _mm512_permutex2var_epi16(low, first, high);
    to[1] = _mm512_permutex2var_epi16(low, second, high);
    return scale;
  }
};

}  // namespace
}  // namespace nf4
