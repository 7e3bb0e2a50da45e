/* GEMMs for many tokens with AMX bfloat16 tiles.
 *
 * float32 operands are kept as two bfloat16 parts, high = bf16(v) and low = bf16(v - high), which hold 16 bits of the
 * significand; high * high + high * low + low * high, summed in float32, misses the product by about 2^-17. With
 * bfloat16 x one GEMM of the high parts is enough.
 *
 * The weights are the left operand, because a tile of those is plain rows: 16 rows of w by 32 columns. x is the right
 * one: 16 pairs of columns by 16 rows of x, ordered once per call. The result is out transposed.
 *
 * Within 64 columns, tile 0 holds the odd ones and tile 1 the even ones, which is how the nibbles come out of the
 * packed bytes; tiles_order gives x the same order. */
#include "amx.h"

namespace nf4 {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

/* Static: GCC's intrinsic names only the first bytes as its input, and drops the initialization of a local one. */
__attribute__((used)) const TileConfig kConfig = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void begin() { _tile_loadconfig(&kConfig); }

void end() { _tile_release(); }

void store_tile(__m512i rows[16], void* tile) {
  transpose16(rows);
  for (int i = 0; i < 16; ++i) _mm512_store_si512((char*)tile + i * 64, rows[i]);
}

void order(const Prepared* x, int64_t t, bool split, bool natural, void* out) {
  const int parts = split ? 2 : 1;
  const int64_t tiles = x->k / 32;
  char* to = (char*)out + t * tiles * parts * kTileBytes;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    __m512i high[16], low[16];
    for (int i = 0; i < 16; ++i) {
      high[i] = low[i] = _mm512_setzero_si512();
      if (t * 16 + i >= x->m) continue;
      const float* row = x->x + (t * 16 + i) * x->stride;
      __m512 a, b;
      if (natural) {
        a = _mm512_loadu_ps(row + tile * 32);
        b = _mm512_loadu_ps(row + tile * 32 + 16);
      } else {
        const float* from = row + tile / 2 * 64;
        const __m512i pick = tile % 2 ? even : odd;
        a = _mm512_permutex2var_ps(_mm512_loadu_ps(from), pick, _mm512_loadu_ps(from + 16));
        b = _mm512_permutex2var_ps(_mm512_loadu_ps(from + 32), pick, _mm512_loadu_ps(from + 48));
      }
      high[i] = high_part(a, b);
      if (split) low[i] = low_part(a, b, high[i]);
    }
    store_tile(high, to + tile * parts * kTileBytes);
    if (split) store_tile(low, to + (tile * 2 + 1) * kTileBytes);
  }
}

void tiles_decode(const Nf4Weight* w, int64_t row0, int rows, int64_t begin, int64_t end, bool split, float* scales,
                  void* panel) {
  if (begin == 0) load_scales_of_rows(w, row0, rows, scales);
  const int64_t ahead = to_next_panel(w, row0);
  char* to = (char*)panel;
  for (int64_t g = begin; g < end; ++g) {
    if (split) {
      decode_columns<true>(w, row0, rows, g, scales, ahead, to);
      to += 2 * kStep<true>;
    } else {
      decode_columns<false>(w, row0, rows, g, scales, ahead, to);
      to += 2 * kStep<false>;
    }
  }
}

/* out[16 rows of x][16 rows of w] of a result tile. */
void store_sums(const float* tile, float* sums) {
  __m512i rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(tile + i * 16);
  transpose16(rows);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(sums + i * kUnit, rows[i]);
}

void tiles_sums(const float* results, int columns, float* sums) {
  for (int c = 0; c < columns; ++c) {
    store_sums(results + 512 * c, sums + c * 16 * kUnit);
    store_sums(results + 512 * c + 256, sums + c * 16 * kUnit + 16);
  }
}

template <int kColumns>
void save_results(float* results) {
  _tile_stored(0, results, 64);
  _tile_stored(1, results + 256, 64);
  if (kColumns == 2) _tile_stored(2, results + 512, 64);
  if (kColumns == 2) _tile_stored(3, results + 768, 64);
}

template <int kColumns>
void load_results(const float* results) {
  _tile_loadd(0, results, 64);
  _tile_loadd(1, results + 256, 64);
  if (kColumns == 2) _tile_loadd(2, results + 512, 64);
  if (kColumns == 2) _tile_loadd(3, results + 768, 64);
}

template <int kColumns>
void store_results(float* sums) {
  alignas(64) float results[1024];
  save_results<kColumns>(results);
  tiles_sums(results, kColumns, sums);
}

void clear_results() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/* x comes from L2: asks for a tile while the one before is multiplied. */
inline void fetch_tile(const char* tile) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_prefetch(tile + i * 64, _MM_HINT_T0);
}

/* Adds 32 columns. Results 0, 1: both row tiles by column t; 2, 3: by column t + 1, which lies `column` bytes behind
 * column t. Operands: 4, 5 of w, 6, 7 of x. */
template <bool kSplit, int kColumns>
inline void multiply_step(const char* a, const char* b, int64_t column) {
  const char* a1 = a + (kSplit ? 2 : 1) * kTileBytes;
  const char* b1 = b + column;
  if (kSplit) {
    /* low(w) * high(x) first, so that the high part of x stays for high(w) */
    _tile_loadd(4, a + kTileBytes, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a1 + kTileBytes, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (kColumns == 2) {
      _tile_loadd(7, b1, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      fetch_tile(b + 2 * kTileBytes);
      fetch_tile(b + 3 * kTileBytes);
    }
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kColumns == 2) {
      fetch_tile(b1 + 2 * kTileBytes);
      fetch_tile(b1 + 3 * kTileBytes);
    }
    _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (kColumns == 2) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_loadd(6, b + kTileBytes, 64);
    if (kColumns == 2) _tile_loadd(7, b1 + kTileBytes, 64);
  } else {
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a1, 64);
    _tile_loadd(6, b, 64);
    if (kColumns == 2) _tile_loadd(7, b1, 64);
  }
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 5, 6);
  if (kColumns == 2) {
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kSplit, int kColumns>
void multiply(const char* a, const Prepared* x, int64_t t, int64_t begin, int64_t end, float* results) {
  constexpr int kPart = (kSplit ? 2 : 1) * kTileBytes;
  const int64_t column = x->k / 32 * kPart;
  const char* b = (const char*)x->order + t * column;
  if (begin == 0) {
    clear_results();
  } else {
    load_results<kColumns>(results);
  }
  for (int64_t i = 2 * begin; i < 2 * end; ++i, a += kStep<kSplit>) {
    multiply_step<kSplit, kColumns>(a, b + i * kPart, column);
  }
  save_results<kColumns>(results);
}

void tiles_multiply(const void* panel, const Prepared* x, int64_t t, int columns, int64_t begin, int64_t end,
                    bool split, float* results) {
  const char* a = (const char*)panel;
  if (split) {
    columns == 2 ? multiply<true, 2>(a, x, t, begin, end, results) : multiply<true, 1>(a, x, t, begin, end, results);
  } else {
    columns == 2 ? multiply<false, 2>(a, x, t, begin, end, results)
                 : multiply<false, 1>(a, x, t, begin, end, results);
  }
}

/* Up to 32 rows of x: the results stay in their tiles while 64 columns after 64 are decoded into one of two small
 * panels in L1 and multiplied. Two, so that decoding overlaps with the multiplication of the columns before. */
template <bool kSplit, int kColumns>
void fused(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, char* panel, float* sums) {
  constexpr int kPart = (kSplit ? 2 : 1) * kTileBytes;
  const int64_t groups = w->k / 64, column = w->k / 32 * kPart;
  const int64_t ahead = to_next_panel(w, row0);
  const char* b = (const char*)x->order;
  load_scales_of_rows(w, row0, rows, scratch);
  clear_results();
  decode_columns<kSplit>(w, row0, rows, 0, scratch, ahead, panel);
  for (int64_t g = 0; g < groups; ++g, b += 2 * kPart) {
    const char* a = panel + g % 2 * (2 * kStep<kSplit>);
    multiply_step<kSplit, kColumns>(a, b, column);
    multiply_step<kSplit, kColumns>(a + kStep<kSplit>, b + kPart, column);
    if (g + 1 < groups) {
      decode_columns<kSplit>(w, row0, rows, g + 1, scratch, ahead, panel + (g + 1) % 2 * (2 * kStep<kSplit>));
    }
    /* GCC's tile loads do not say what they read: keeps the stores above before the next ones. */
    __asm__ volatile("" : : : "memory");
  }
  store_results<kColumns>(sums);
}

void tiles_fused(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, bool split, float* scratch,
                 void* panel, float* sums) {
  char* to = (char*)panel;
  if (split) {
    x->m > 16 ? fused<true, 2>(w, x, row0, rows, scratch, to, sums)
              : fused<true, 1>(w, x, row0, rows, scratch, to, sums);
  } else {
    x->m > 16 ? fused<false, 2>(w, x, row0, rows, scratch, to, sums)
              : fused<false, 1>(w, x, row0, rows, scratch, to, sums);
  }
}

/* bfloat16 weights are left tiles as they lie in memory, with no low part. */
template <int kColumns>
void multiply_bf16(const char* a, int64_t row_bytes, const char* b, int64_t tiles, float* sums) {
  const int64_t column = tiles * 2 * kTileBytes;
  clear_results();
  for (int64_t i = 0; i < tiles; ++i, a += 64, b += 2 * kTileBytes) {
    _tile_loadd(4, a, row_bytes);
    _tile_loadd(5, a + 16 * row_bytes, row_bytes);
    for (int part = 0; part < 2; ++part) {
      _tile_loadd(6, b + part * kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (kColumns == 2) {
        _tile_loadd(7, b + column + part * kTileBytes, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  store_results<kColumns>(sums);
}

void tiles_bf16(const uint16_t* w, const Prepared* x, int64_t t, int columns, float* sums) {
  const int64_t tiles = x->k / 32;
  const char* b = (const char*)x->order + t * tiles * 2 * kTileBytes;
  columns == 2 ? multiply_bf16<2>((const char*)w, x->k * 2, b, tiles, sums)
               : multiply_bf16<1>((const char*)w, x->k * 2, b, tiles, sums);
}

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_float32_kernels();
    k.name = "amx";
    k.fused_rows = 6; /* from 7 rows on, tiles are faster */
    k.tiles_from = 7;
    k.bf16_tiles_from = 3;
    k.tiles_begin = begin;
    k.tiles_end = end;
    k.tiles_order = order;
    k.tiles_decode = tiles_decode;
    k.tiles_multiply = tiles_multiply;
    k.tiles_sums = tiles_sums;
    k.tiles_fused = tiles_fused;
    k.tiles_bf16 = tiles_bf16;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
