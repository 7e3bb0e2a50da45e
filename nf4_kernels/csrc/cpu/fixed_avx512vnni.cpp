/* GEMMs in 16-bit fixed point with AVX-512's VNNI (fixed.h says what that is), for any number of tokens. */
#include "fixed_one_avx512.h"

namespace nf4 {
namespace {

/* ---- Few tokens: codes are looked up in registers, right before they are multiplied. ---- */

void rows_order(const Prepared* x, float* order) {
  const int64_t groups = x->k / 64;
  const ColumnOrder columns;
  int16_t* to = (int16_t*)order;
  float* scales = (float*)((char*)order + x->m * x->k * 2);
  for (int64_t i = 0; i < x->m; ++i) {
    for (int64_t g = 0; g < groups; ++g, to += 64) {
      __m512i ordered[2];
      scales[i * groups + g] = columns.order(x->x + i * x->stride + g * 64, ordered);
      _mm512_storeu_si512(to, ordered[0]);
      _mm512_storeu_si512(to + 32, ordered[1]);
    }
  }
}

/* M tokens times 2 P rows of w: pair r is rows r and P + r. The rows after them start `ahead` bytes behind rows[0]. */
template <int M, int P>
inline void rows_times(const uint8_t* const rows[2 * P], const float* const scales[2 * P], __m512i codes,
                       const FewTokens& x, int64_t k, int64_t ahead, float* sums) {
  const int64_t groups = k / 64;
  __m512 total[M][P];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < P; ++r) total[m][r] = _mm512_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    __m512i words[P], sum[M][P];
    __m512 scale[P];
    /* The next 2 P rows follow in memory, but hardware sees 2 P short streams: fetch them in order from here. */
#pragma GCC unroll 8
    for (int r = 0; r < P; ++r) _mm_prefetch((const char*)rows[0] + ahead + (g * P + r) * 64, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < P; ++r) {
      words[r] = two_rows(rows[r] + g * 32, rows[P + r] + g * 32);
      scale[r] = _mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[r][g]), 0xff00, _mm_load_ss(scales[P + r] + g));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i weight[P];
#pragma GCC unroll 8
      for (int r = 0; r < P; ++r) {
        weight[r] = _mm512_permutexvar_epi16(words[r], codes);
        if (j < 3) words[r] = _mm512_srli_epi16(words[r], 4);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512i columns =
            _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(x.columns + m * k + g * 64 + j * 16)));
#pragma GCC unroll 8
        for (int r = 0; r < P; ++r) {
          if (j == 0) sum[m][r] = _mm512_setzero_si512();
          add_products(sum[m][r], weight[r], columns);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 x_scale = _mm512_set1_ps(x.scales[m * groups + g]);
#pragma GCC unroll 8
      for (int r = 0; r < P; ++r) {
        total[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][r]), _mm512_mul_ps(scale[r], x_scale), total[m][r]);
      }
    }
  }
  store_pairs<M, P>(total, sums);
}

template <int M, int P>
void rows_of(const Nf4Weight* w, const Prepared* x, int64_t row0, int count, float* scratch, float* sums) {
  const int64_t k = w->k, groups = k / 64;
  const FewTokens from(x);
  const __m512i codes = code_words(w);
  for (int first = 0; first < count; first += 2 * P) {
    const uint8_t* rows[2 * P];
    const float* scales[2 * P];
    for (int r = 0; r < 2 * P; ++r) {
      /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
      const int row = first + r < count ? first + r : count - 1;
      rows[r] = w->packed + (row0 + row) * (k / 2);
      scales[r] = scratch + row * groups;
    }
    rows_times<M, P>(rows, scales, codes, from, k, P * k, sums + first);
  }
}

/* One token: whole blocks of rows take the kernel of their own. */
void one_token(const Nf4Weight* w, const Prepared* x, int64_t row0, int count, float* scratch, float* sums) {
  const int64_t groups = w->k / 64;
  const FewTokens from(x);
  const __m512i codes = code_words(w);
  int row = 0;
  for (; row + kOneRows <= count; row += kOneRows) {
    const uint8_t* packed = w->packed + (row0 + row) * (w->k / 2);
    one_times(packed, scratch + row * groups, codes, from.columns, from.scales, groups, sums + row);
  }
  if (row < count) rows_of<1, 4>(w, x, row0 + row, count - row, scratch + row * groups, sums + row);
}

/* Scales of rows [row0, row0 + rows), one for each 64 columns, for integers; whole vectors, so up to 15 floats more. */
void fixed_scales(const Nf4Weight* w, int64_t row0, int rows, float* scales) {
  load_scales_of_rows(w, row0, rows, scales);
  const __m512 unit = _mm512_set1_ps(fixed_unit_of(w));
  for (int64_t i = 0; i < rows * (w->k / 64); i += 16) {
    _mm512_storeu_ps(scales + i, _mm512_mul_ps(_mm512_loadu_ps(scales + i), unit));
  }
}

void rows(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums) {
  fixed_scales(w, row0, rows, scratch);
  switch (x->m) {
    case 1: return one_token(w, x, row0, rows, scratch, sums);
    case 2: return rows_of<2, 4>(w, x, row0, rows, scratch, sums);
    case 3: return rows_of<3, 2>(w, x, row0, rows, scratch, sums);
    case 4: return rows_of<4, 2>(w, x, row0, rows, scratch, sums);
    case 5: return rows_of<5, 2>(w, x, row0, rows, scratch, sums);
    case 6: return rows_of<6, 2>(w, x, row0, rows, scratch, sums);
    case 7: return rows_of<7, 1>(w, x, row0, rows, scratch, sums);
    default: return rows_of<8, 1>(w, x, row0, rows, scratch, sums);
  }
}

/* ---- More tokens: a vector holds one pair of columns of a whole tile column. ---- */

void order_tile(const Prepared* x, int64_t t, bool, bool, void* out) {
  const int64_t groups = x->k / 64;
  const ColumnOrder columns;
  char* to = (char*)out + t * groups * kTileGroup;
  for (int64_t g = 0; g < groups; ++g, to += kTileGroup) {
    float* scales = (float*)(to + 32 * 64);
    __m512i half[2][16];
    for (int i = 0; i < 16; ++i) {
      __m512i ordered[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      scales[i] = t * 16 + i < x->m ? columns.order(x->x + (t * 16 + i) * x->stride + g * 64, ordered) : 0.0f;
      half[0][i] = ordered[0];
      half[1][i] = ordered[1];
    }
    for (int h = 0; h < 2; ++h) {
      transpose16(half[h]);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (16 * h + i) * 64, half[h][i]);
    }
  }
}

void decode_panel(const Nf4Weight* w, int64_t row0, int rows, int64_t begin, int64_t end, bool, float* scales,
                  void* panel) {
  if (begin == 0) fixed_scales(w, row0, rows, scales);
  const __m512i codes = code_words(w);
  const int64_t groups = w->k / 64;
  char* to = (char*)panel;
  for (int64_t g = begin; g < end; ++g, to += kPanelGroup) {
    float* panel_scales = (float*)(to + kUnit * 128);
    for (int r = 0; r < rows; r += 2) {
      /* Behind an odd last row, it is read again; its copy's results land behind those that emit stores. */
      const int next = r + 1 < rows ? r + 1 : r;
      const uint8_t* packed = w->packed + row0 * (w->k / 2) + g * 32;
      __m512i words = two_rows(packed + r * (w->k / 2), packed + next * (w->k / 2));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i integers = _mm512_permutexvar_epi16(words, codes);
        _mm256_store_si256((__m256i*)(to + r * 128 + j * 32), _mm512_castsi512_si256(integers));
        _mm256_store_si256((__m256i*)(to + (r + 1) * 128 + j * 32), _mm512_extracti64x4_epi64(integers, 1));
        words = _mm512_srli_epi16(words, 4);
      }
      panel_scales[r] = scales[r * groups + g];
      panel_scales[r + 1] = scales[next * groups + g];
    }
  }
}

/* R rows of a panel's 64 columns times V tile columns, which lie `column` bytes apart; results V of [kUnit, 16]. */
template <int V, int R>
inline void multiply_rows(const char* panel, const float* scales, const char* x, int64_t column, bool first,
                          float* results) {
  __m512i sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_si512();
  }
  for (int p = 0; p < 32; ++p) {
    __m512i columns[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) columns[v] = _mm512_load_si512(x + v * column + p * 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t two;
      memcpy(&two, panel + r * 128 + p * 4, 4);
      const __m512i pair = _mm512_set1_epi32(two);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) add_products(sum[r][v], pair, columns[v]);
    }
  }
  __m512 x_scales[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) x_scales[v] = _mm512_load_ps(x + v * column + 32 * 64);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const __m512 scale = _mm512_set1_ps(scales[r]);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const __m512 both = _mm512_mul_ps(scale, x_scales[v]), value = _mm512_cvtepi32_ps(sum[r][v]);
      float* to = results + v * 512 + r * 16;
      _mm512_store_ps(to, first ? _mm512_mul_ps(value, both) : _mm512_fmadd_ps(value, both, _mm512_load_ps(to)));
    }
  }
}

template <int V>
void multiply_columns(const char* panel, const char* x, int64_t column, int64_t groups, bool first, float* results) {
  constexpr int R = V == 2 ? 8 : 16;
  for (int64_t g = 0; g < groups; ++g, panel += kPanelGroup, x += kTileGroup) {
    const float* scales = (const float*)(panel + kUnit * 128);
    for (int r = 0; r < kUnit; r += R) {
      multiply_rows<V, R>(panel + r * 128, scales + r, x, column, first && g == 0, results + r * 16);
    }
  }
}

void multiply(const void* panel, const Prepared* x, int64_t t, int columns, int64_t begin, int64_t end, bool,
              float* results) {
  const int64_t column = x->k / 64 * kTileGroup;
  const char* from = (const char*)x->order + t * column + begin * kTileGroup;
  if (columns == 2) {
    multiply_columns<2>((const char*)panel, from, column, end - begin, begin == 0, results);
  } else {
    multiply_columns<1>((const char*)panel, from, column, end - begin, begin == 0, results);
  }
}

/* results [columns][kUnit][16 rows of x] to sums [16 columns][kUnit]. */
void sums_of(const float* results, int columns, float* sums) {
  for (int c = 0; c < columns; ++c) {
    for (int r = 0; r < kUnit; r += 16) {
      __m512i v[16];
      for (int l = 0; l < 16; ++l) v[l] = _mm512_load_si512(results + c * 512 + (r + l) * 16);
      transpose16(v);
      for (int l = 0; l < 16; ++l) _mm512_store_si512(sums + (c * 16 + l) * kUnit + r, v[l]);
    }
  }
}

}  // namespace

const Kernels* avx512vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_float32_kernels();
    k.name = "avx512vnni";
    k.fixed_point = true;
    k.fused_rows = 8;
    k.fused_order = rows_order;
    k.fused = rows;
    k.tiles_from = k.fused_rows + 1;
    k.tiles_begin = no_state;
    k.tiles_end = no_state;
    k.tiles_order = order_tile;
    k.tiles_decode = decode_panel;
    k.tiles_sums = sums_of;
    k.tiles_multiply = multiply;
    k.tiles_fused = few_tiles<decode_panel, multiply, sums_of>;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
