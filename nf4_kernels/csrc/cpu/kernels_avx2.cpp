/* Kernels with AVX2, FMA and F16C in float32: dequantizing, storing, and the GEMMs of float_rows.h. */
#include "avx2.h"
#include "float_rows.h"
#include "gated_delta_tile.h"
#include "mamba2_kernels.h"

namespace nf4 {
namespace {

__m256i bf16_bits(__m256 value) {
  __m256i bits = _mm256_castps_si256(value);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  return _mm256_srli_epi32(rounded, 16);
}

void store8(void* out, int64_t i, __m256 value, int32_t dtype) {
  if (dtype == NF4_FLOAT32) {
    _mm256_storeu_ps((float*)out + i, value);
  } else if (dtype == NF4_FLOAT16) {
    _mm_storeu_si128((__m128i*)((uint16_t*)out + i), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {
    __m256i bits = bf16_bits(value);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128((__m128i*)((uint16_t*)out + i), packed);
  }
}

/* Eight codes of 0..15: two look-ups in eight entries, the fourth index bit chooses. */
__m256 look_up(__m256i codes, __m256 low, __m256 high) {
  __m256 choose = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), choose);
}

void decode16(const uint8_t* packed, __m256 low, __m256 high, void* out, int64_t at, int32_t dtype) {
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)packed));
  __m256 even = look_up(_mm256_srli_epi32(bytes, 4), low, high);
  __m256 odd = look_up(bytes, low, high);
  __m256 first = _mm256_unpacklo_ps(even, odd), second = _mm256_unpackhi_ps(even, odd);
  store8(out, at, _mm256_permute2f128_ps(first, second, 0x20), dtype);
  store8(out, at + 8, _mm256_permute2f128_ps(first, second, 0x31), dtype);
}

void decode(const Nf4Weight* w, int64_t begin, int64_t end, void* out, int32_t dtype) {
  for (int64_t i = begin; i < end;) {
    const int64_t block = i / w->blocksize;
    int64_t stop = (block + 1) * w->blocksize;
    if (stop > end) stop = end;
    const float scale = scale_of(w, block);
    if (i & 1) {
      store_as(out, i - begin, code_of(w, i) * scale, dtype);
      ++i;
    }
    /* The table is scaled instead of the weights. */
    const __m256 low = _mm256_mul_ps(_mm256_load_ps(codes_of(w)), _mm256_set1_ps(scale));
    const __m256 high = _mm256_mul_ps(_mm256_load_ps(codes_of(w) + 8), _mm256_set1_ps(scale));
    for (; i + 16 <= stop; i += 16) decode16(w->packed + i / 2, low, high, out, i - begin, dtype);
    for (; i < stop; ++i) store_as(out, i - begin, code_of(w, i) * scale, dtype);
  }
}

struct Lanes {
  using Vector = __m256;
  static constexpr int kWidth = 8, kTokens = 4, kWideTokens = 4;
  static constexpr int rows(int tokens) { return tokens <= 2 ? 4 : 2; }
  static constexpr int wide_rows(int tokens) { return rows(tokens); }
  static inline Vector zero() { return _mm256_setzero_ps(); }
  static inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  template <int R>
  static inline void sums(const Vector* total, float* to) {
    for (int r = 0; r < R; ++r) to[r] = sum8(total[r]);
  }
  /* Even columns are the low halves of the 32-bit lanes, odd ones the high halves. */
  static inline void widen(const uint16_t* from, Vector* even, Vector* odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)from);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
  }
};

__m256 load8(const void* from, int64_t i, int32_t dtype) {
  if (dtype == NF4_FLOAT32) return _mm256_loadu_ps((const float*)from + i);
  __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)from + i));
  if (dtype == NF4_FLOAT16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

void emit(const float* sums, const void* bias, void* out, int32_t dtype, int64_t n, int64_t m0, int count,
          int64_t row0, int rows) {
  for (int i = 0; i < count; ++i) {
    const int64_t at = (m0 + i) * n + row0;
    int j = 0;
    for (; j + 8 <= rows; j += 8) {
      __m256 value = _mm256_loadu_ps(sums + i * kUnit + j);
      if (bias) value = _mm256_add_ps(value, load8(bias, row0 + j, dtype));
      store8(out, at + j, value, dtype);
    }
    for (; j < rows; ++j) {
      float value = sums[i * kUnit + j];
      if (bias) value += load_as(bias, row0 + j, dtype);
      store_as(out, at + j, value, dtype);
    }
  }
}

void widen(const uint16_t* from, float* to, int64_t k, int64_t stride) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) _mm256_storeu_ps(to + i, load8(from, i, NF4_BFLOAT16));
  for (; i < k; ++i) to[i] = from_bf16(from[i]);
  for (; i < stride; ++i) to[i] = 0;
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.name = "avx2";
    k.gated_delta = gated_delta_avx2;
    k.mamba2 = &mamba2_avx2;
    k.decode = decode;
    k.dot = dot<Lanes>;
    k.emit = emit;
    k.widen = widen;
    use_fixed_avx2(&k);
    k.bf16_order = bf16_order<Lanes>;
    k.bf16_rows = bf16_rows<Lanes>;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
