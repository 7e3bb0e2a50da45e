/* GEMMs of few tokens with AVX-512: the weights are decoded in registers, right before they are multiplied.
 *
 * Sixteen 32-bit lanes hold 32 packed bytes of each of two rows, A in lanes 0..7 and B in lanes 8..15. Nibble j of a
 * lane is a code: vpermps looks it up by the lane's low four bits, and a shift by four brings the next one there, so
 * 128 codes cost eight look-ups and seven shifts and no widening. Lane l, nibble j is column 8 l + (j ^ 1) of 64;
 * fused_order puts x in that order once, eight floats that both halves use. */
#include "avx512.h"

namespace nf4 {

void fused_order_avx512(const Prepared* x, float* order) {
  for (int64_t i = 0; i < x->m; ++i) {
    const float* from = x->x + i * x->stride;
    float* to = order + i * x->k;
    for (int64_t b = 0; b < x->k; b += 64) {
      for (int j = 0; j < 8; ++j) {
        for (int l = 0; l < 8; ++l) to[b + j * 8 + l] = from[b + l * 8 + (j ^ 1)];
      }
    }
  }
}

namespace {

/* M rows of x times 2 P rows of w: pair r is rows r and P + r. The rows after them start `ahead`
 * bytes behind rows[0]. */
template <int M, int P>
void rows_times(const uint8_t* const rows[2 * P], const float* const scales[2 * P], const float* table,
                const float* x, int64_t k, int64_t ahead, float* sums) {
  const __m512 codes = _mm512_load_ps(table);
  /* Scaling a block's sum is cheaper than scaling its weights while few rows of x share them, but needs registers
   * for the sums of the block. */
  constexpr bool kScaleSums = M * P <= 8;
  __m512 total[M][P];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < P; ++r) total[m][r] = _mm512_setzero_ps();
  }
  const int64_t groups = k / 64;
  for (int64_t g = 0; g < groups; ++g) {
    __m512i nibbles[P];
    __m512 scale[P];
    /* The next 2 P rows follow in memory, but hardware sees 2 P short streams: fetch them in order from here. */
#pragma GCC unroll 8
    for (int r = 0; r < P; ++r) _mm_prefetch((const char*)rows[0] + ahead + (g * P + r) * 64, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < P; ++r) {
      __m256i low = _mm256_loadu_si256((const __m256i*)(rows[r] + g * 32));
      __m256i high = _mm256_loadu_si256((const __m256i*)(rows[P + r] + g * 32));
      nibbles[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      scale[r] = _mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[r][g]), 0xff00, _mm_load_ss(scales[P + r] + g));
    }
    __m512 part[M][P];
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < P; ++r) part[m][r] = kScaleSums ? _mm512_setzero_ps() : total[m][r];
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m512 weight[P];
#pragma GCC unroll 8
      for (int r = 0; r < P; ++r) {
        weight[r] = _mm512_permutexvar_ps(nibbles[r], codes);
        if (!kScaleSums) weight[r] = _mm512_mul_ps(weight[r], scale[r]);
        if (j < 7) nibbles[r] = _mm512_srli_epi32(nibbles[r], 4);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512 value = _mm512_broadcast_f32x8(_mm256_loadu_ps(x + m * k + g * 64 + j * 8));
#pragma GCC unroll 8
        for (int r = 0; r < P; ++r) {
          part[m][r] = kScaleSums && j == 0 ? _mm512_mul_ps(weight[r], value)
                                            : _mm512_fmadd_ps(weight[r], value, part[m][r]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < P; ++r) {
        total[m][r] = kScaleSums ? _mm512_fmadd_ps(part[m][r], scale[r], total[m][r]) : part[m][r];
      }
    }
  }
  store_pairs<M, P>(total, sums);
}

template <int M, int P>
void fused(const Nf4Weight* w, const float* order, int64_t row0, int count, float* scratch, float* sums) {
  const int64_t k = w->k, groups = k / 64;
  load_scales_of_rows(w, row0, count, scratch);
  for (int first = 0; first < count; first += 2 * P) {
    const uint8_t* rows[2 * P];
    const float* scales[2 * P];
    for (int r = 0; r < 2 * P; ++r) {
      /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
      int row = first + r < count ? first + r : count - 1;
      rows[r] = w->packed + (row0 + row) * (k / 2);
      scales[r] = scratch + row * groups;
    }
    rows_times<M, P>(rows, scales, codes_of(w), order, k, P * k, sums + first);
  }
}

}  // namespace

void fused_avx512(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums) {
  const float* order = (const float*)x->order;
  switch (x->m) {
    case 1: return fused<1, 4>(w, order, row0, rows, scratch, sums);
    case 2: return fused<2, 4>(w, order, row0, rows, scratch, sums);
    case 3: return fused<3, 4>(w, order, row0, rows, scratch, sums);
    case 4: return fused<4, 4>(w, order, row0, rows, scratch, sums);
    case 5: return fused<5, 2>(w, order, row0, rows, scratch, sums);
    case 6: return fused<6, 2>(w, order, row0, rows, scratch, sums);
    case 7: return fused<7, 2>(w, order, row0, rows, scratch, sums);
    default: return fused<8, 2>(w, order, row0, rows, scratch, sums);
  }
}

}  // namespace nf4
