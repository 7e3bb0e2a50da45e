/* float32 tokens times weights in compact bfloat16, with AVX-512. Every sum adds up in the order of dot_avx512.cpp's for
 * plain bfloat16. */
#include "avx512.h"
#include "compact.h"

namespace nf4 {
namespace {

/* What expanding takes from group to group. */
struct Expander {
  __m256i high_bytes;
  __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  __m256i nibble = _mm256_set1_epi8(15);
  __m512i high_half = _mm512_set1_epi32((int)0xffff0000);

  explicit Expander(const uint8_t* bytes)
      : high_bytes(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes))) {}

  /* The even and the odd ones of 32 columns; bf16_order's order. */
  inline void expand(const uint8_t* group, __m512* even, __m512* odd) const {
    const __m256i low = _mm256_loadu_si256((const __m256i*)group);
    const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(group + 32)));
    const __m256i high =
        _mm256_shuffle_epi8(high_bytes, _mm256_and_si256(_mm256_srlv_epi32(codes, shifts), nibble));
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi8(low, high)),
                                             _mm256_unpackhi_epi8(low, high), 1);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(words, high_half));
  }
};

constexpr int kRows = 4;

/* The next rows, which hardware does not foresee, because these are kRows streams. */
inline void fetch(const uint8_t* next, int64_t g) {
  for (int i = 0; i < kRows * kCompactGroup / 64; ++i) {
    _mm_prefetch((const char*)next + g * kRows * kCompactGroup + i * 64, _MM_HINT_T0);
  }
}

template <int M>
inline void store_sums(const __m512 (&total)[M][kRows], float* sums) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    __m128 low, high;
    reduce4(total[m], &low, &high);
    _mm_storeu_ps(sums + m * kUnit, _mm_add_ps(low, high));
  }
}

/* M rows of x times kRows rows of w, expanded in registers. */
template <int M>
inline void few_times(const uint8_t* const rows[kRows], const Expander& expander, const float* x, int64_t k, float* sums) {
  __m512 total[M][kRows];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) total[m][r] = _mm512_setzero_ps();
  }
  const uint8_t* next = rows[0] + kRows * (k / kCompactColumns * kCompactGroup);
  for (int64_t g = 0; g < k / kCompactColumns; ++g) {
    fetch(next, g);
    const float* columns = x + g * kCompactColumns;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __m512 even, odd;
      expander.expand(rows[r] + g * kCompactGroup, &even, &odd);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        total[m][r] = _mm512_fmadd_ps(even, _mm512_loadu_ps(columns + m * k), total[m][r]);
        total[m][r] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(columns + m * k + 16), total[m][r]);
      }
    }
  }
  store_sums<M>(total, sums);
}

/* M rows of x times the expanded rows. */
template <int M>
inline void expanded_times(const float* panel, const float* x, int64_t k, float* sums) {
  __m512 total[M][kRows];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) total[m][r] = _mm512_setzero_ps();
  }
  for (int64_t c = 0; c < k; c += 16) {
    __m512 weights[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) weights[r] = _mm512_loadu_ps(panel + r * k + c);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512 columns = _mm512_loadu_ps(x + m * k + c);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[m][r] = _mm512_fmadd_ps(weights[r], columns, total[m][r]);
    }
  }
  store_sums<M>(total, sums);
}

/* More rows of x: kRows rows of w are expanded in L1, and all of x passes by. */
inline void many_times(const uint8_t* const rows[kRows], const Expander& expander, const float* x, int64_t k, int count,
                       float* panel, float* sums) {
  const uint8_t* next = rows[0] + kRows * (k / kCompactColumns * kCompactGroup);
  for (int64_t g = 0; g < k / kCompactColumns; ++g) {
    fetch(next, g);
    for (int r = 0; r < kRows; ++r) {
      __m512 even, odd;
      expander.expand(rows[r] + g * kCompactGroup, &even, &odd);
      _mm512_storeu_ps(panel + r * k + g * kCompactColumns, even);
      _mm512_storeu_ps(panel + r * k + g * kCompactColumns + 16, odd);
    }
  }
  for (int m = 0; m < count; m += 4) {
    const float* from = x + m * k;
    float* to = sums + m * kUnit;
    switch (count - m) {
      case 1: expanded_times<1>(panel, from, k, to); break;
      case 2: expanded_times<2>(panel, from, k, to); break;
      case 3: expanded_times<3>(panel, from, k, to); break;
      default: expanded_times<4>(panel, from, k, to);
    }
  }
}

}  // namespace

void compact_rows_avx512(const CompactBf16* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows,
                         float* panel, float* sums) {
  const int64_t k = x->k, row_bytes = k / kCompactColumns * kCompactGroup;
  const float* from = (const float*)x->order + m0 * k;
  const Expander expander(w->high_bytes);
  for (int first = 0; first < rows; first += kRows) {
    const uint8_t* at[kRows];
    for (int r = 0; r < kRows; ++r) {
      /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
      at[r] = w->groups + (row0 + (first + r < rows ? first + r : rows - 1)) * row_bytes;
    }
    switch (count) {
      case 1: few_times<1>(at, expander, from, k, sums + first); break;
      case 2: few_times<2>(at, expander, from, k, sums + first); break;
      case 3: few_times<3>(at, expander, from, k, sums + first); break;
      default: many_times(at, expander, from, k, count, panel, sums + first);
    }
  }
}

}  // namespace nf4
