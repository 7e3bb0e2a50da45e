/* Operands of the GEMMs in fixed point with AVX2; static for the reason given in kernels.h. */
#pragma once

#include "avx2.h"
#include "fixed.h"

namespace nf4 {

/* The columns c .. c + 7 and c + 8 .. c + 15 times `inverse` as sixteen integers in order. */
static inline __m256i to_fixed(const float* x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
}

/* Scale of 64 columns. */
static inline float scale64(const float* x, __m256* inverse) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 sum = _mm256_setzero_ps(), largest = sum;
  for (int c = 0; c < 64; c += 8) {
    const __m256 magnitude = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + c));
    sum = _mm256_add_ps(sum, magnitude);
    largest = _mm256_max_ps(largest, magnitude);
  }
  alignas(32) float sums[8], most[8];
  _mm256_store_ps(sums, sum);
  _mm256_store_ps(most, largest);
  for (int i = 1; i < 8; ++i) {
    sums[0] += sums[i];
    most[0] = most[i] > most[0] ? most[i] : most[0];
  }
  float factor;
  const float scale = fixed_scale(sums[0], most[0], &factor);
  *inverse = _mm256_set1_ps(factor);
  return scale;
}

/* The two bytes of eight 16-bit codes, in every lane. */
namespace {
struct CodeBytes {
  __m256i low, high;
  explicit CodeBytes(const Nf4Weight* w) {
    const int16_t* codes = fixed_codes_of(w);
    const __m128i even = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i odd = _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i first = _mm_load_si128((const __m128i*)codes);
    const __m128i second = _mm_load_si128((const __m128i*)(codes + 8));
    low = _mm256_broadcastsi128_si256(
        _mm_unpacklo_epi64(_mm_shuffle_epi8(first, even), _mm_shuffle_epi8(second, even)));
    high = _mm256_broadcastsi128_si256(
        _mm_unpacklo_epi64(_mm_shuffle_epi8(first, odd), _mm_shuffle_epi8(second, odd)));
  }
};
}  // namespace

/* 64 codes as integers: those of even columns in even[0], even[1], of odd ones in odd[0], odd[1]. Lane h, place i of part
 * p is byte 16 h + 8 p + i. */
static inline void look_up64(const uint8_t* packed, const CodeBytes& codes, __m256i even[2], __m256i odd[2]) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)packed);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
  const __m256i lower = _mm256_and_si256(bytes, mask);
  const __m256i upper_low = _mm256_shuffle_epi8(codes.low, upper), upper_high = _mm256_shuffle_epi8(codes.high, upper);
  const __m256i lower_low = _mm256_shuffle_epi8(codes.low, lower), lower_high = _mm256_shuffle_epi8(codes.high, lower);
  even[0] = _mm256_unpacklo_epi8(upper_low, upper_high);
  even[1] = _mm256_unpackhi_epi8(upper_low, upper_high);
  odd[0] = _mm256_unpacklo_epi8(lower_low, lower_high);
  odd[1] = _mm256_unpackhi_epi8(lower_low, lower_high);
}

/* Few tokens: fixed_rows_avx2.cpp. */
void fixed_order_avx2(const Prepared* x, float* order);
void fixed_rows_avx2(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums);

}  // namespace nf4
