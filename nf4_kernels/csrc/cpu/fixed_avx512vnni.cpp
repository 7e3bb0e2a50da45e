/* GEMMs in 16-bit fixed point with AVX-512's VNNI, for more tokens than are decoded in registers; fixed.h says what that is.
 * A 512-bit vector holds one pair of columns of a whole tile column; one instruction multiplies and adds. */
#include "avx512.h"
#include "fixed.h"

namespace nf4 {
namespace {

/* sum += the products of the pairs of 16-bit integers. GCC 12 copies every sum around the intrinsic for this. */
inline void add_products(__m512i& sum, __m512i a, __m512i b) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
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

/* Up to kTileRows rows of x: 64 columns after 64 are decoded and multiplied. */
void few_tiles(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, bool split, float* scratch, void* panel,
               float* sums) {
  alignas(64) float results[1024];
  const Kernels* shared = avx2_kernels();
  const int columns = x->m > 16 ? 2 : 1;
  for (int64_t g = 0; g < w->k / 64; ++g) {
    shared->tiles_decode(w, row0, rows, g, g + 1, split, scratch, panel);
    multiply(panel, x, 0, columns, g, g + 1, split, results);
  }
  shared->tiles_sums(results, columns, sums);
}

}  // namespace

const Kernels* avx512vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_kernels();
    /* x, panels and results are laid out as AVX2's kernels have them: that work is a few percent. */
    const Kernels* shared = avx2_kernels();
    k.name = "avx512vnni";
    k.tiles_from = k.fused_rows + 1;
    k.tiles_begin = shared->tiles_begin;
    k.tiles_end = shared->tiles_end;
    k.tiles_order = shared->tiles_order;
    k.tiles_decode = shared->tiles_decode;
    k.tiles_sums = shared->tiles_sums;
    k.tiles_multiply = multiply;
    k.tiles_fused = few_tiles;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
