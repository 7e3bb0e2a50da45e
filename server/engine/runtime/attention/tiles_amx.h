// GEMMs of float32 numbers on AMX: bfloat16 tiles and how numbers become such.
//
// float32 operands are kept as two bfloat16 parts, high = bf16(v) and low = bf16(v - high); high * high + high * low +
// low * high, summed in float32, is off from the exact value by about 2^-17. Left operands are 16 rows by 32 columns,
// right ones 16 pairs of rows by 16 columns.
#pragma once

#include <cstdint>

// What the compiler may use; whether this machine runs it is the caller's to know.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAVE_AMX_TILES 1
#include <immintrin.h>

// The undefined vectors inside GCC 12's own intrinsics set this off.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace amx {

constexpr int kTileBytes = 1024;
constexpr int kStep = 4 * kTileBytes;  // 32 of the summed dimension: two tiles, each followed by its low part
constexpr int kWidth = 32;             // of a result

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
__attribute__((used)) static const TileConfig kConfig = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// This thread's tiles while it lives.
struct Tiles {
  Tiles() { _tile_loadconfig(&kConfig); }
  ~Tiles() { _tile_release(); }
};

// GCC's tile loads do not say what they read: keeps the stores before in place.
inline void stores_done() { __asm__ volatile("" : : : "memory"); }

// c[32][kWidth] = a b (+ c), over `steps` steps of both operands. Results 0 to 3; operands: 4, 5 of a, 6, 7 of b.
inline void multiply(const char* a, const char* b, int64_t steps, float* c, bool add) {
  constexpr int kRow = kWidth * 4;
  if (add) {
    _tile_loadd(0, c, kRow);
    _tile_loadd(1, c + 16, kRow);
    _tile_loadd(2, c + 16 * kWidth, kRow);
    _tile_loadd(3, c + 16 * kWidth + 16, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i, a += kStep, b += kStep) {
    // low(a) high(b) first, so that the high part of b stays for high(a)
    _tile_loadd(4, a + kTileBytes, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 2 * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 3 * kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 2 * kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(6, b + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 3 * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kRow);
  _tile_stored(1, c + 16, kRow);
  _tile_stored(2, c + 16 * kWidth, kRow);
  _tile_stored(3, c + 16 * kWidth + 16, kRow);
}

struct Parts {
  __m512i high, low;
};

// The parts of a's 16 numbers and then of b's.
inline Parts split(__m512 a, __m512 b) {
  const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  const __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
  const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
  return {high, (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, _mm512_castsi512_ps(second)),
                                             _mm512_sub_ps(a, _mm512_castsi512_ps(first)))};
}

// The parts of a's and b's numbers, interleaved: a's are in the lower half of each lane's 32 bits.
inline Parts split_pairs(__m512 a, __m512 b) {
  const __m512i turns = _mm512_ternarylogic_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_slli_epi32(_mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31), 16),
      _mm512_setzero_si512(), 0xfc);
  const __m512i high = _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
  const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(high, _mm512_set1_epi32(-65536)));
  const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, second), _mm512_sub_ps(a, first));
  return {high, _mm512_permutexvar_epi16(turns, low)};
}

inline void transpose(__m512i rows[16]) {
  __m512i next[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    next[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    next[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(next[i], next[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(next[i], next[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(next[i + 1], next[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(next[i + 1], next[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    next[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    next[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    next[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
    next[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = next[i];
}

inline __mmask16 lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// The first `count` of up to 16 floats, zeros behind them.
inline __m512 load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(lanes(count), from); }

// The rows of a tile, and of its low part behind it.
inline void store_transposed(Parts rows[16], char* to) {
  __m512i high[16], low[16];
  for (int i = 0; i < 16; ++i) high[i] = rows[i].high, low[i] = rows[i].low;
  transpose(high);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, high[i]);
  transpose(low);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + kTileBytes + i * 64, low[i]);
}

}  // namespace amx
#endif
