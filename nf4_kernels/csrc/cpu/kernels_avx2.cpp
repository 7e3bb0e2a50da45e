/* Kernels with AVX2, FMA and F16C in float32: dequantizing, storing, and GEMMs through float32 panels in L1, which are for
 * weights that those in fixed point and with bfloat16 weights do not take. */
#include "avx2.h"
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

/* M rows of x times R panel rows. */
template <int M, int R>
void panel_times(const float* panel, const float* x, int64_t stride, float* sums) {
  __m256 total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < stride; k += 8) {
    __m256 weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) weight[r] = _mm256_loadu_ps(panel + r * stride + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m256 value = _mm256_loadu_ps(x + m * stride + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[m][r] = _mm256_fmadd_ps(value, weight[r], total[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m * kUnit + r] = sum8(total[m][r]);
  }
}

template <int M>
void rows_times(const float* panel, int rows, const float* x, int64_t stride, float* sums) {
  int j = 0;
  for (; j + 4 <= rows && M <= 2; j += 4) panel_times<M, 4>(panel + j * stride, x, stride, sums + j);
  for (; j + 2 <= rows; j += 2) panel_times<M, 2>(panel + j * stride, x, stride, sums + j);
  for (; j < rows; ++j) panel_times<M, 1>(panel + j * stride, x, stride, sums + j);
}

void dot(const float* panel, int rows, const Prepared* x, int64_t m0, int count, float* sums) {
  for (int i = 0; i < count; i += 4) {
    const float* a = x->x + (m0 + i) * x->stride;
    float* to = sums + i * kUnit;
    switch (count - i) {
      case 1: rows_times<1>(panel, rows, a, x->stride, to); break;
      case 2: rows_times<2>(panel, rows, a, x->stride, to); break;
      case 3: rows_times<3>(panel, rows, a, x->stride, to); break;
      default: rows_times<4>(panel, rows, a, x->stride, to);
    }
  }
}

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
    k.dot = dot;
    k.emit = emit;
    k.widen = widen;
    use_fixed_avx2(&k);
    use_bf16_avx2(&k);
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
