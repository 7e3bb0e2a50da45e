/* GEMMs with float32 panels and with bfloat16 weights, AVX-512: lanes run along the columns. */
#include "avx512.h"

namespace nf4 {
namespace {

/* M rows of x times R panel rows; R is a multiple of four. */
template <int M, int R>
void panel_times(const float* panel, const float* x, int64_t stride, float* sums) {
  __m512 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < stride; k += 16) {
    __m512 value[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) value[m] = _mm512_loadu_ps(x + m * stride + k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 weight = _mm512_loadu_ps(panel + r * stride + k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) total[m][r] = _mm512_fmadd_ps(value[m], weight, total[m][r]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 4) {
      __m128 low, high;
      reduce4(&total[m][r], &low, &high);
      _mm_storeu_ps(sums + m * kUnit + r, _mm_add_ps(low, high));
    }
  }
}

/* M rows of x times R rows of bfloat16 weights, 32 columns a step. Even columns are the low halves of the 32-bit
 * lanes, odd ones the high halves: a shift and a mask widen them, and x was put in that order. The next R rows follow in
 * memory, but hardware sees R short streams: they are fetched in order from here. */
template <int M, int R>
void bf16_times(const uint16_t* const rows[R], const float* x, int64_t k, float* sums) {
  const __m512i high_half = _mm512_set1_epi32((int)0xffff0000);
  __m512 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm512_setzero_ps();
  }
  const char* next = (const char*)(rows[0] + R * k);
  for (int64_t c = 0; c < k; c += 32) {
    __m512 even[R], odd[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) _mm_prefetch(next + c * R * 2 + r * 64, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m512i both = _mm512_loadu_si512(rows[r] + c);
      even[r] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      odd[r] = _mm512_castsi512_ps(_mm512_and_si512(both, high_half));
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 x_even = _mm512_loadu_ps(x + m * k + c), x_odd = _mm512_loadu_ps(x + m * k + c + 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[m][r] = _mm512_fmadd_ps(even[r], x_even, total[m][r]);
        total[m][r] = _mm512_fmadd_ps(odd[r], x_odd, total[m][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    __m512 four[4];
    for (int r = 0; r < 4; ++r) four[r] = r < R ? total[m][r < R ? r : 0] : _mm512_setzero_ps();
    __m128 low, high;
    reduce4(four, &low, &high);
    alignas(16) float four_sums[4];
    _mm_store_ps(four_sums, _mm_add_ps(low, high));
    for (int r = 0; r < R; ++r) sums[m * kUnit + r] = four_sums[r];
  }
}

template <int M, int R>
void bf16_rows(const uint16_t* w, const float* x, int64_t k, int64_t row0, int count, float* sums) {
  for (int first = 0; first < count; first += R) {
    const uint16_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w + (row0 + (first + r < count ? first + r : count - 1)) * k;
    bf16_times<M, R>(rows, x, k, sums + first);
  }
}

}  // namespace

void dot_avx512(const float* panel, int rows, const Prepared* x, int64_t m0, int count, float* sums) {
  const int64_t stride = x->stride;
  for (int first = 0; first < rows; first += 4) {
    /* All of the panel's eight rows at once where they are there; memory behind `rows` is never read as a result. */
    const bool eight = rows - first > 4;
    const float* from = panel + first * stride;
    for (int i = 0; i < count; i += 3) {
      const float* a = x->x + (m0 + i) * stride;
      float* to = sums + i * kUnit + first;
      switch (count - i) {
        case 1: eight ? panel_times<1, 8>(from, a, stride, to) : panel_times<1, 4>(from, a, stride, to); break;
        case 2: eight ? panel_times<2, 8>(from, a, stride, to) : panel_times<2, 4>(from, a, stride, to); break;
        default: eight ? panel_times<3, 8>(from, a, stride, to) : panel_times<3, 4>(from, a, stride, to);
      }
    }
    if (eight) break;
  }
}

void bf16_order_avx512(const Prepared* x, float* order) {
  for (int64_t i = 0; i < x->m; ++i) {
    const float* from = x->x + i * x->stride;
    float* to = order + i * x->k;
    for (int64_t c = 0; c < x->k; c += 32) {
      for (int l = 0; l < 16; ++l) {
        to[c + l] = from[c + 2 * l];
        to[c + 16 + l] = from[c + 2 * l + 1];
      }
    }
  }
}

void bf16_rows_avx512(const uint16_t* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows,
                      float* sums) {
  const int64_t k = x->k;
  const float* order = (const float*)x->order + m0 * k;
  switch (count) {
    case 1: return bf16_rows<1, 4>(w, order, k, row0, rows, sums);
    case 2: return bf16_rows<2, 4>(w, order, k, row0, rows, sums);
    case 3: return bf16_rows<3, 4>(w, order, k, row0, rows, sums);
    case 4: return bf16_rows<4, 4>(w, order, k, row0, rows, sums);
    case 5: return bf16_rows<5, 2>(w, order, k, row0, rows, sums);
    case 6: return bf16_rows<6, 2>(w, order, k, row0, rows, sums);
    case 7: return bf16_rows<7, 2>(w, order, k, row0, rows, sums);
    default: return bf16_rows<8, 2>(w, order, k, row0, rows, sums);
  }
}

}  // namespace nf4
