/* GEMMs of more tokens in 16-bit fixed point with AVX2, through panels in L1; fixed.h says what that is. */
#include "fixed_avx2.h"

namespace nf4 {
namespace {

/* Of eight rows of eight pairs, eight pairs of eight rows. */
inline void store_transposed(__m256i r[8], char* to) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_store_si256((__m256i*)(to + i * 64), _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    _mm256_store_si256((__m256i*)(to + (i + 4) * 64), _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}

/* A panel's pairs come as look_up64() and one more unpacking leave them: place 8 j + 4 h + i is pair 16 h + 4 j + i. */
inline __m256i pairs_of(const int16_t* columns, int j) {
  const __m128i low = _mm_load_si128((const __m128i*)(columns + 8 * j));
  const __m128i high = _mm_load_si128((const __m128i*)(columns + 32 + 8 * j));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

void order_tile(const Prepared* x, int64_t t, bool, bool, void* out) {
  const int64_t groups = x->k / 64;
  char* to = (char*)out + t * groups * kTileGroup;
  alignas(32) int16_t columns[16][64];
  for (int64_t g = 0; g < groups; ++g, to += kTileGroup) {
    float* scales = (float*)(to + 32 * 64);
    for (int i = 0; i < 16; ++i) {
      __m256i* row = (__m256i*)columns[i];
      scales[i] = 0;
      for (int c = 0; c < 4; ++c) _mm256_store_si256(row + c, _mm256_setzero_si256());
      if (t * 16 + i >= x->m) continue;
      const float* from = x->x + (t * 16 + i) * x->stride + g * 64;
      __m256 inverse;
      scales[i] = scale64(from, &inverse);
      for (int c = 0; c < 4; ++c) _mm256_store_si256(row + c, to_fixed(from + 16 * c, inverse));
    }
    for (int j = 0; j < 4; ++j) {
      for (int half = 0; half < 2; ++half) {
        __m256i r[8];
        for (int i = 0; i < 8; ++i) r[i] = pairs_of(columns[8 * half + i], j);
        store_transposed(r, to + j * 8 * 64 + half * 32);
      }
    }
  }
}

void decode_panel(const Nf4Weight* w, int64_t row0, int rows, int64_t begin, int64_t end, bool, float* scales,
                  void* panel) {
  if (begin == 0) scales_of_rows(w, row0, rows, fixed_unit_of(w), scales);
  const CodeBytes codes(w);
  const int64_t groups = w->k / 64;
  char* to = (char*)panel;
  for (int64_t g = begin; g < end; ++g, to += kPanelGroup) {
    float* panel_scales = (float*)(to + kUnit * 128);
    for (int r = 0; r < rows; ++r) {
      __m256i even[2], odd[2];
      look_up64(w->packed + (row0 + r) * (w->k / 2) + g * 32, codes, even, odd);
      __m256i* row = (__m256i*)(to + r * 128);
      for (int p = 0; p < 2; ++p) {
        _mm256_store_si256(row + 2 * p, _mm256_unpacklo_epi16(even[p], odd[p]));
        _mm256_store_si256(row + 2 * p + 1, _mm256_unpackhi_epi16(even[p], odd[p]));
      }
      panel_scales[r] = scales[r * groups + g];
    }
  }
}

/* R rows of a panel's 64 columns times V halves of a tile column; results [kUnit, 16]. */
template <int V, int R>
inline void multiply_rows(const char* panel, const float* scales, const char* x, bool first, float* results) {
  __m256i sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = _mm256_setzero_si256();
  }
#pragma GCC unroll 2
  for (int p = 0; p < 32; ++p) {
    __m256i columns[V];
    for (int v = 0; v < V; ++v) columns[v] = _mm256_load_si256((const __m256i*)(x + p * 64 + v * 32));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t two;
      memcpy(&two, panel + r * 128 + p * 4, 4);
      const __m256i pair = _mm256_set1_epi32(two);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] = _mm256_add_epi32(sum[r][v], _mm256_madd_epi16(pair, columns[v]));
    }
  }
  const float* x_scales = (const float*)(x + 32 * 64);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m256 scale = _mm256_set1_ps(scales[r]);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_load_ps(x_scales + 8 * v));
      const __m256 value = _mm256_cvtepi32_ps(sum[r][v]);
      float* to = results + r * 16 + 8 * v;
      _mm256_store_ps(to, first ? _mm256_mul_ps(value, both) : _mm256_fmadd_ps(value, both, _mm256_load_ps(to)));
    }
  }
}

/* One tile column; `half`: only its first eight rows are there. */
void multiply_tile(const char* panel, const char* x, int64_t groups, bool first, bool half, float* results) {
  for (int64_t g = 0; g < groups; ++g, panel += kPanelGroup, x += kTileGroup) {
    const float* scales = (const float*)(panel + kUnit * 128);
    for (int r = 0; r < kUnit; r += 8) {
      if (half) {
        multiply_rows<1, 8>(panel + r * 128, scales + r, x, first && g == 0, results + r * 16);
      } else {
        multiply_rows<2, 4>(panel + r * 128, scales + r, x, first && g == 0, results + r * 16);
        multiply_rows<2, 4>(panel + (r + 4) * 128, scales + r + 4, x, first && g == 0, results + (r + 4) * 16);
      }
    }
  }
}

void multiply(const void* panel, const Prepared* x, int64_t t, int columns, int64_t begin, int64_t end, bool,
              float* results) {
  const int64_t groups = x->k / 64;
  for (int c = 0; c < columns; ++c) {
    const char* from = (const char*)x->order + ((t + c) * groups + begin) * kTileGroup;
    multiply_tile((const char*)panel, from, end - begin, begin == 0, x->m - (t + c) * 16 <= 8, results + c * 512);
  }
}

/* results [columns][kUnit][16 rows of x] to sums [16 columns][kUnit]. */
void sums_of(const float* results, int columns, float* sums) {
  for (int c = 0; c < columns; ++c) {
    for (int r = 0; r < kUnit; r += 8) {
      for (int i = 0; i < 16; i += 8) {
        __m256 v[8];
        for (int l = 0; l < 8; ++l) v[l] = _mm256_load_ps(results + c * 512 + (r + l) * 16 + i);
        transpose8(v);
        for (int l = 0; l < 8; ++l) _mm256_storeu_ps(sums + (c * 16 + i + l) * kUnit + r, v[l]);
      }
    }
  }
}

}  // namespace

void use_fixed_avx2(Kernels* k) {
  k->fixed_point = true;
  k->fused_rows = 4;
  k->fused_order = fixed_order_avx2;
  k->fused = fixed_rows_avx2;
  k->tiles_from = 5;
  k->tiles_begin = no_state;
  k->tiles_end = no_state;
  k->tiles_order = order_tile;
  k->tiles_decode = decode_panel;
  k->tiles_multiply = multiply;
  k->tiles_sums = sums_of;
  k->tiles_fused = few_tiles<decode_panel, multiply, sums_of>;
}

}  // namespace nf4
