/* float32 tokens times weights stored as bfloat16, with AVX2: the weights are widened in registers. */
#include "avx2.h"

namespace nf4 {
namespace {

/* M rows of x times R rows of w, sixteen columns a step: even columns are the low halves of the 32-bit lanes, odd ones the
 * high halves, and x was put in that order. The next R rows follow in memory, but hardware sees R short streams: they are
 * fetched in order from here. */
template <int M, int R>
inline void rows_times(const uint16_t* const rows[R], const float* x, int64_t k, float* sums) {
  const __m256i high_half = _mm256_set1_epi32((int)0xffff0000);
  __m256 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm256_setzero_ps();
  }
  const char* next = (const char*)(rows[0] + R * k);
  for (int64_t c = 0; c < k; c += 16) {
#pragma GCC unroll 2
    for (int i = 0; i < R / 2; ++i) _mm_prefetch(next + c * R * 2 + i * 64, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i both = _mm256_loadu_si256((const __m256i*)(rows[r] + c));
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, high_half));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        total[m][r] = _mm256_fmadd_ps(even, _mm256_loadu_ps(x + m * k + c), total[m][r]);
        total[m][r] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(x + m * k + c + 8), total[m][r]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m * kUnit + r] = sum8(total[m][r]);
  }
}

template <int M>
void rows_of(const uint16_t* w, const float* x, int64_t k, int64_t row0, int count, float* sums) {
  constexpr int R = M <= 2 ? 4 : 2;
  for (int first = 0; first < count; first += R) {
    const uint16_t* rows[R];
    /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
    for (int r = 0; r < R; ++r) rows[r] = w + (row0 + (first + r < count ? first + r : count - 1)) * k;
    rows_times<M, R>(rows, x, k, sums + first);
  }
}

void order(const Prepared* x, float* to) {
  for (int64_t i = 0; i < x->m; ++i) {
    const float* from = x->x + i * x->stride;
    for (int64_t c = 0; c < x->k; c += 16, to += 16) {
      for (int l = 0; l < 8; ++l) {
        to[l] = from[c + 2 * l];
        to[8 + l] = from[c + 2 * l + 1];
      }
    }
  }
}

void rows(const uint16_t* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows, float* sums) {
  const int64_t k = x->k;
  for (; count > 0; m0 += 4, count -= 4, sums += 4 * kUnit) {
    const float* from = (const float*)x->order + m0 * k;
    switch (count) {
      case 1: rows_of<1>(w, from, k, row0, rows, sums); break;
      case 2: rows_of<2>(w, from, k, row0, rows, sums); break;
      case 3: rows_of<3>(w, from, k, row0, rows, sums); break;
      default: rows_of<4>(w, from, k, row0, rows, sums);
    }
  }
}

}  // namespace

void use_bf16_avx2(Kernels* k) {
  k->bf16_order = order;
  k->bf16_rows = rows;
}

}  // namespace nf4
