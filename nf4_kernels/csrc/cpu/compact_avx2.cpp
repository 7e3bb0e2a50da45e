/* float32 tokens times weights in compact bfloat16, with AVX2: one look-up gives the high bytes of 32 weights. */
#include "avx2.h"
#include "compact.h"

namespace nf4 {
namespace {

/* What expanding takes from group to group. */
struct Expander {
  __m256i high_bytes;
  __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  __m256i nibble = _mm256_set1_epi8(15);
  __m256i high_half = _mm256_set1_epi32((int)0xffff0000);

  explicit Expander(const uint8_t* bytes)
      : high_bytes(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes))) {}

  /* Of 32 columns: the even and the odd ones of the first 16, and those of the others; bf16_order's order. */
  inline void expand(const uint8_t* group, __m256 to[4]) const {
    const __m256i low = _mm256_loadu_si256((const __m256i*)group);
    const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(group + 32)));
    const __m256i high =
        _mm256_shuffle_epi8(high_bytes, _mm256_and_si256(_mm256_srlv_epi32(codes, shifts), nibble));
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    to[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    to[1] = _mm256_castsi256_ps(_mm256_and_si256(first, high_half));
    to[2] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
    to[3] = _mm256_castsi256_ps(_mm256_and_si256(second, high_half));
  }
};

constexpr int kRows = 4;

/* The next rows, which hardware does not foresee, because these are kRows streams. */
inline void fetch(const uint8_t* next, int64_t g) {
  for (int i = 0; i < kRows * kCompactGroup / 64; ++i) {
    _mm_prefetch((const char*)next + g * kRows * kCompactGroup + i * 64, _MM_HINT_T0);
  }
}

/* M rows of x times kRows rows of w, expanded in registers. Every sum adds up in the order of bf16_avx2.cpp. */
template <int M>
inline void few_times(const uint8_t* const rows[kRows], const Expander& expander, const float* x, int64_t k, float* sums) {
  __m256 total[M][kRows];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) total[m][r] = _mm256_setzero_ps();
  }
  const uint8_t* next = rows[0] + kRows * (k / kCompactColumns * kCompactGroup);
  for (int64_t g = 0; g < k / kCompactColumns; ++g) {
    fetch(next, g);
    const float* columns = x + g * kCompactColumns;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __m256 weights[4];
      expander.expand(rows[r] + g * kCompactGroup, weights);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          total[m][r] = _mm256_fmadd_ps(weights[i], _mm256_loadu_ps(columns + m * k + 8 * i), total[m][r]);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) sums[m * kUnit + r] = sum8(total[m][r]);
  }
}

/* M rows of x times R of the expanded rows. */
template <int M, int R>
inline void expanded_times(const float* panel, const float* x, int64_t k, float* sums) {
  __m256 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm256_setzero_ps();
  }
  for (int64_t c = 0; c < k; c += 8) {
    __m256 columns[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) columns[m] = _mm256_loadu_ps(x + m * k + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 weights = _mm256_loadu_ps(panel + r * k + c);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) total[m][r] = _mm256_fmadd_ps(weights, columns[m], total[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m * kUnit + r] = sum8(total[m][r]);
  }
}

/* More rows of x: kRows rows of w are expanded in L1, and all of x passes by. */
inline void many_times(const uint8_t* const rows[kRows], const Expander& expander, const float* x, int64_t k, int count,
                       float* panel, float* sums) {
  const uint8_t* next = rows[0] + kRows * (k / kCompactColumns * kCompactGroup);
  for (int64_t g = 0; g < k / kCompactColumns; ++g) {
    fetch(next, g);
    for (int r = 0; r < kRows; ++r) {
      __m256 weights[4];
      expander.expand(rows[r] + g * kCompactGroup, weights);
      for (int i = 0; i < 4; ++i) _mm256_storeu_ps(panel + r * k + g * kCompactColumns + 8 * i, weights[i]);
    }
  }
  for (int m = 0; m < count; m += 3) {
    const float* from = x + m * k;
    float* to = sums + m * kUnit;
    switch (count - m) {
      case 1: expanded_times<1, kRows>(panel, from, k, to); break;
      case 2: expanded_times<2, kRows>(panel, from, k, to); break;
      default: expanded_times<3, kRows>(panel, from, k, to);
    }
  }
}

void rows(const CompactBf16* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows, float* panel,
          float* sums) {
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
      default: many_times(at, expander, from, k, count, panel, sums + first);
    }
  }
}

}  // namespace

void use_compact_avx2(Kernels* k) { k->compact_rows = rows; }

}  // namespace nf4
