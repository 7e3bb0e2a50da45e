/* Products with an 8-bit copy of a weight, their sums exact in 32 bits, and bounds on what the weight itself gives. */
#include "screening.h"

#include "avx2.h"

namespace nf4 {
namespace {

constexpr int kRows = 4;
constexpr float kNone = -__builtin_inff();

/* M rows of x times kRows rows of codes. The rows behind the next ones are prefetched, because these are kRows streams. */
template <int M>
inline void sums_of(const int8_t* const rows[kRows], const int16_t* x, int64_t k, int32_t* sums) {
  __m256i total[M][kRows];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) total[m][r] = _mm256_setzero_si256();
  }
  const int8_t* ahead = rows[0] + 2 * kRows * k;
  for (int64_t c = 0; c < k; c += 16) {
    _mm_prefetch((const char*)ahead + kRows * c, _MM_HINT_T0);
    __m256i columns[M];
    for (int m = 0; m < M; ++m) columns[m] = _mm256_loadu_si256((const __m256i*)(x + m * k + c));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(rows[r] + c)));
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) {
        total[m][r] = _mm256_add_epi32(total[m][r], _mm256_madd_epi16(codes, columns[m]));
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    const __m256i low = _mm256_hadd_epi32(total[m][0], total[m][1]), high = _mm256_hadd_epi32(total[m][2], total[m][3]);
    const __m256i both = _mm256_hadd_epi32(low, high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128((__m128i*)(sums + m * kUnit), four);
  }
}

/* NaN does not count: a bias that is infinite makes one of a result's bounds NaN, and max_ps gives its second operand then. */
inline float largest_of(const float* values) {
  __m256 most = _mm256_set1_ps(kNone);
  for (int r = 0; r < kUnit; r += 8) most = _mm256_max_ps(_mm256_load_ps(values + r), most);
  alignas(32) float each[8];
  _mm256_store_ps(each, most);
  for (int i = 1; i < 8; ++i) each[0] = each[i] > each[0] ? each[i] : each[0];
  return each[0];
}

/* Results of row i of x, and the bounds of the largest one. */
inline void bound(const Screening* w, const ScreenedX* x, int64_t i, const float* bias, int64_t row0, int rows,
                  const int32_t* sums, float* out, float* lower, float* upper) {
  alignas(32) float least[kUnit], most[kUnit];
  for (int r = 0; r < kUnit; ++r) least[r] = most[r] = kNone;
  const float step = x->steps[i], norm = x->norms[i], rest = x->rests[i];
  const float *scales = w->scales + row0, *norms = w->norms + row0, *errors = w->errors + row0;
  for (int r = 0; r < rows; ++r) {
    const float value = (float)sums[r] * (step * scales[r]) + (bias ? bias[row0 + r] : 0.0f);
    const float magnitude = value < 0.0f ? -value : value;
    const float error = norm * errors[r] + rest * norms[r] + kRounding * magnitude + kUnderflow;
    out[r] = value;
    least[r] = value - error;
    most[r] = value + error;
  }
  *lower = largest_of(least);
  *upper = largest_of(most);
}

void rows(const Screening* w, const ScreenedX* x, const float* bias, int64_t row0, int rows, float* out, int64_t n,
          float* lower, float* upper) {
  for (int64_t i = 0; i < x->m; i += 2) {
    const int count = x->m - i > 1 ? 2 : 1;
    alignas(32) int32_t sums[2 * kUnit];
    for (int first = 0; first < rows; first += kRows) {
      const int8_t* at[kRows];
      for (int r = 0; r < kRows; ++r) {
        /* Behind the last row, it is read again; nothing reads its sum. */
        at[r] = w->codes + (row0 + (first + r < rows ? first + r : rows - 1)) * x->k;
      }
      const int16_t* from = x->x + i * x->k;
      count == 1 ? sums_of<1>(at, from, x->k, sums + first) : sums_of<2>(at, from, x->k, sums + first);
    }
    for (int j = 0; j < count; ++j) {
      bound(w, x, i + j, bias, row0, rows, sums + j * kUnit, out + (i + j) * n + row0, lower + i + j, upper + i + j);
    }
  }
}

}  // namespace

void use_screening_avx2(Kernels* k) { k->screen_rows = rows; }

}  // namespace nf4
