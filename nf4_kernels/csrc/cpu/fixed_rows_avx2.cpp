/* GEMMs of few tokens in 16-bit fixed point with AVX2: the codes are looked up in registers, right before they are multiplied. */
#include "fixed_avx2.h"

namespace nf4 {
namespace {

/* M rows of x times R rows of w. x's rows are k apart, their scales k / 64; within 64 columns even and odd ones lie as
 * look_up64() gives codes. */
template <int M, int R>
inline void rows_times(const uint8_t* const rows[R], const float* const row_scales[R], const CodeBytes& codes,
                       const FewTokens& x, int64_t k, int64_t ahead, float* sums) {
  const int64_t groups = k / 64;
  __m256 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    /* The rows behind these are R short streams that hardware does not foresee. */
    if (g % 2 == 0 || R > 2) {
      for (int r = 0; r < R; r += 2) _mm_prefetch((const char*)rows[0] + ahead + (g * R + r) * 32, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m256i even[2], odd[2];
      look_up64(rows[r] + g * 32, codes, even, odd);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m256i* columns = (const __m256i*)(x.columns + m * k + g * 64);
        __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even[0], _mm256_loadu_si256(columns)),
                                       _mm256_madd_epi16(odd[0], _mm256_loadu_si256(columns + 1)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even[1], _mm256_loadu_si256(columns + 2)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd[1], _mm256_loadu_si256(columns + 3)));
        const __m256 scale = _mm256_set1_ps(row_scales[r][g] * x.scales[m * groups + g]);
        total[m][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, total[m][r]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m * kUnit + r] = sum8(total[m][r]);
  }
}

template <int M>
void rows_of(const Nf4Weight* w, const Prepared* x, int64_t row0, int count, const float* scales, float* sums) {
  constexpr int R = M == 1 ? 4 : 2;
  const int64_t k = w->k, groups = k / 64;
  const FewTokens from(x);
  const CodeBytes codes(w);
  for (int first = 0; first < count; first += R) {
    const uint8_t* rows[R];
    const float* row_scales[R];
    for (int r = 0; r < R; ++r) {
      /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
      const int row = first + r < count ? first + r : count - 1;
      rows[r] = w->packed + (row0 + row) * (k / 2);
      row_scales[r] = scales + row * groups;
    }
    rows_times<M, R>(rows, row_scales, codes, from, k, R * (k / 2), sums + first);
  }
}

}  // namespace

void fixed_order_avx2(const Prepared* x, float* order) {
  const int64_t groups = x->k / 64;
  int16_t* to = (int16_t*)order;
  float* scales = (float*)((char*)order + x->m * x->k * 2);
  for (int64_t i = 0; i < x->m; ++i) {
    for (int64_t g = 0; g < groups; ++g, to += 64) {
      const float* from = x->x + i * x->stride + g * 64;
      __m256 inverse;
      scales[i * groups + g] = scale64(from, &inverse);
      alignas(32) int16_t columns[64];
      for (int c = 0; c < 64; c += 16) _mm256_store_si256((__m256i*)(columns + c), to_fixed(from + c, inverse));
      for (int p = 0; p < 2; ++p) {
        for (int h = 0; h < 2; ++h) {
          for (int l = 0; l < 8; ++l) {
            const int byte = 16 * h + 8 * p + l;
            to[32 * p + 8 * h + l] = columns[2 * byte];
            to[32 * p + 16 + 8 * h + l] = columns[2 * byte + 1];
          }
        }
      }
    }
  }
}

void fixed_rows_avx2(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums) {
  scales_of_rows(w, row0, rows, fixed_unit_of(w), scratch);
  switch (x->m) {
    case 1: return rows_of<1>(w, x, row0, rows, scratch, sums);
    case 2: return rows_of<2>(w, x, row0, rows, scratch, sums);
    case 3: return rows_of<3>(w, x, row0, rows, scratch, sums);
    default: return rows_of<4>(w, x, row0, rows, scratch, sums);
  }
}

}  // namespace nf4
