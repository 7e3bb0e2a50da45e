/* The operands of the AMX kernels: bfloat16 parts, and panels of decoded weights; static as kernels.h explains. */
#pragma once

#include "avx512.h"

namespace nf4 {

constexpr int kTileBytes = 1024;

static inline __m512i high_part(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

/* bf16 parts of v minus its high part; v's order is [a, b]. */
static inline __m512i low_part(__m512 a, __m512 b, __m512i high) {
  __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
  __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
  return high_part(_mm512_sub_ps(a, _mm512_castsi512_ps(first)), _mm512_sub_ps(b, _mm512_castsi512_ps(second)));
}

/* A panel is kUnit rows: for each 32 columns the tiles of rows 0..15 and 16..31, each followed by its low part. */
template <bool kSplit>
constexpr int64_t kStep = (kSplit ? 4 : 2) * kTileBytes; /* from 32 columns to the next */

/* 64 columns of one row, into tile rows that start at `to`. */
template <bool kSplit>
static inline void decode_block(const uint8_t* from, float scale, __m512 codes, char* to) {
  /* The block's sixteen products, twice, because vpermw reads five bits of an index: the fifth may be anything. */
  const __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scale));
  const __m512i high = high_part(scaled, scaled);
  const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  const __m512i upper = _mm512_srli_epi16(bytes, 4);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(bytes, high));
  _mm512_store_si512(to + kStep<kSplit>, _mm512_permutexvar_epi16(upper, high));
  if (kSplit) {
    __m512 half = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16));
    const __m512 rest = _mm512_sub_ps(scaled, half);
    const __m512i low = high_part(rest, rest);
    _mm512_store_si512(to + kTileBytes, _mm512_permutexvar_epi16(bytes, low));
    _mm512_store_si512(to + kStep<kSplit> + kTileBytes, _mm512_permutexvar_epi16(upper, low));
  }
}

/* Bytes from a panel's packed rows to the next one's; 0 where there is no whole next one. */
static inline int64_t to_next_panel(const Nf4Weight* w, int64_t row0) {
  return row0 + 2 * kUnit <= w->n ? kUnit * w->k / 2 : 0;
}

/* Columns 64 g .. 64 g + 63 of the rows of a panel; fetches as many bytes of the panel `ahead` bytes on, because
 * hardware does not follow reads of 32 bytes a row. */
template <bool kSplit>
static void decode_columns(const Nf4Weight* w, int64_t row0, int rows, int64_t g, const float* scales,
                           int64_t ahead, char* to) {
  const __m512 codes = _mm512_load_ps(codes_of(w));
  const int64_t row_bytes = w->k / 2, groups = w->k / 64;
  const uint8_t* from = w->packed + row0 * row_bytes + g * 32;
  const uint8_t* later = w->packed + row0 * row_bytes + ahead + g * kUnit * 32;
  for (int r = 0; r < rows; ++r) {
    if (ahead && r % 2 == 0) _mm_prefetch((const char*)later + r * 32, _MM_HINT_T0);
    decode_block<kSplit>(from + r * row_bytes, scales[r * groups + g], codes,
                         to + r / 16 * (kStep<kSplit> / 2) + r % 16 * 64);
  }
}

}  // namespace nf4
