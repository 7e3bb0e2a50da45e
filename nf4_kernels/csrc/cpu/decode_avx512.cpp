/* Dequantizing, widening and storing with AVX-512, and the table of its kernels in float32. */
#include "avx512.h"
#include "float_rows.h"
#include "gated_delta_tile.h"
#include "mamba2_kernels.h"

namespace nf4 {
namespace {

/* A block's sixteen products code * scale, already rounded to the output type: decoding is then only a look-up. */
struct Table {
  __m512i even, odd; /* float32: the same. 16-bit: in the low half for even elements, in the high half for odd ones */
};

__m512i bf16_bits(__m512 value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_srli_epi32(rounded, 16);
}

__m512i half_bits(__m512 value, int32_t dtype) {
  if (dtype == NF4_BFLOAT16) return bf16_bits(value);
  return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

Table make_table(__m512 codes, float scale, int32_t dtype) {
  __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scale));
  if (dtype == NF4_FLOAT32) return {_mm512_castps_si512(scaled), _mm512_castps_si512(scaled)};
  __m512i bits = half_bits(scaled, dtype);
  return {bits, _mm512_slli_epi32(bits, 16)};
}

/* 32 elements from 16 bytes. vpermd reads an index's low four bits only, so the low nibble needs no mask. */
void decode32(const uint8_t* packed, const Table& table, void* out, bool wide) {
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)packed));
  __m512i even = _mm512_permutexvar_epi32(_mm512_srli_epi32(bytes, 4), table.even);
  __m512i odd = _mm512_permutexvar_epi32(bytes, table.odd);
  if (!wide) {
    _mm512_storeu_si512(out, _mm512_or_si512(even, odd));
    return;
  }
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi32(even, first, odd));
  _mm512_storeu_si512((float*)out + 16, _mm512_permutex2var_epi32(even, second, odd));
}

void decode(const Nf4Weight* w, int64_t begin, int64_t end, void* out, int32_t dtype) {
  const __m512 codes = _mm512_load_ps(codes_of(w));
  const bool wide = dtype == NF4_FLOAT32;
  const int64_t width = wide ? 4 : 2;
  int64_t i = begin, block = begin / w->blocksize;
  alignas(64) float scales[256];
  int64_t scales_from = 0, scales_end = 0;
  for (; i < end; ++block) {
    if (block >= scales_end) {
      int64_t last = (end - 1) / w->blocksize + 1;
      scales_from = block;
      scales_end = last - block > 240 ? block + 240 : last;
      load_scales(w, scales_from, scales_end - scales_from, scales);
    }
    const float scale = scales[block - scales_from];
    int64_t stop = (block + 1) * w->blocksize;
    if (stop > end) stop = end;
    if (i & 1) {
      store_as(out, i - begin, code_of(w, i) * scale, dtype);
      ++i;
    }
    const Table table = make_table(codes, scale, dtype);
    for (; i + 32 <= stop; i += 32) decode32(w->packed + i / 2, table, (char*)out + (i - begin) * width, wide);
    for (; i < stop; ++i) store_as(out, i - begin, code_of(w, i) * scale, dtype);
  }
}

struct Lanes {
  using Vector = __m512;
  static constexpr int kWidth = 16, kTokens = 3, kWideTokens = 8;
  static constexpr int rows(int) { return kPanelRows; }
  static constexpr int wide_rows(int tokens) { return tokens <= 4 ? 4 : 2; }
  static inline Vector zero() { return _mm512_setzero_ps(); }
  static inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  template <int R>
  static inline void sums(const Vector* total, float* to) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 4) {
      Vector four[4];
      for (int i = 0; i < 4; ++i) four[i] = r + i < R ? total[r + i < R ? r + i : 0] : zero();
      __m128 low, high;
      reduce4(four, &low, &high);
      alignas(16) float found[4];
      _mm_store_ps(found, _mm_add_ps(low, high));
      for (int i = 0; i < 4 && r + i < R; ++i) to[r + i] = found[i];
    }
  }
  /* Even columns are the low halves of the 32-bit lanes, odd ones the high halves. */
  static inline void widen(const uint16_t* from, Vector* even, Vector* odd) {
    const __m512i both = _mm512_loadu_si512(from);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
  }
};

__m512 load_bias(const void* bias, int64_t at, __mmask16 mask, int32_t dtype) {
  if (dtype == NF4_FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float*)bias + at);
  __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t*)bias + at);
  if (dtype == NF4_FLOAT16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

void emit(const float* sums, const void* bias, void* out, int32_t dtype, int64_t n, int64_t m0, int count,
          int64_t row0, int rows) {
  for (int j = 0; j < rows; j += 16) {
    const __mmask16 mask = rows - j >= 16 ? 0xffff : (__mmask16)((1u << (rows - j)) - 1);
    const __m512 add = bias ? load_bias(bias, row0 + j, mask, dtype) : _mm512_setzero_ps();
    for (int i = 0; i < count; ++i) {
      __m512 value = _mm512_maskz_loadu_ps(mask, sums + i * kUnit + j);
      if (bias) value = _mm512_add_ps(value, add);
      const int64_t at = (m0 + i) * n + row0 + j;
      if (dtype == NF4_FLOAT32) {
        _mm512_mask_storeu_ps((float*)out + at, mask, value);
      } else {
        __m256i half = _mm512_cvtepi32_epi16(half_bits(value, dtype));
        _mm256_mask_storeu_epi16((uint16_t*)out + at, mask, half);
      }
    }
  }
}

void widen(const uint16_t* from, float* to, int64_t k, int64_t stride) {
  for (int64_t i = 0; i < stride; i += 16) {
    __mmask16 mask = k - i >= 16 ? 0xffff : (__mmask16)((1u << (k - i)) - 1);
    __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + i));
    _mm512_storeu_si512(to + i, _mm512_slli_epi32(half, 16));
  }
}

}  // namespace

const Kernels* avx512_float32_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.gated_delta = gated_delta_avx512;
    k.mamba2 = &mamba2_avx512;
    k.decode = decode;
    k.dot = dot<Lanes>;
    k.emit = emit;
    k.widen = widen;
    k.fused_rows = 8;
    k.fused_order = fused_order_avx512;
    k.fused = fused_avx512;
    k.bf16_order = bf16_order<Lanes>;
    k.bf16_rows = bf16_rows<Lanes>;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
