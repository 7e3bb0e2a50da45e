// The absorbed form of latent attention for few tokens, float32: each head's matrices are read as 4-bit codes, row by row.
#include <algorithm>
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

extern "C" {

// What packed_heads.py hands over (it mirrors the struct).
struct PackedHeads {
  const uint8_t* codes;  // [heads, plain + width, rank] / 2, the high half of a byte first
  const float* scales;   // one for each blocksize elements, of which a row has a whole number
  const float* table;    // [16]
  int64_t heads, plain, width, rank, blocksize;
};
}

namespace {

// Below this many multiplications a second thread costs more than it saves.
constexpr int64_t kParallelWork = 200'000;
constexpr int64_t kMaxRank = 4096;

// Row `row` of the matrices, in order.
inline void decode(const PackedHeads& a, int64_t row, float* out) {
  const uint8_t* codes = a.codes + row * a.rank / 2;
  const float* scales = a.scales + row * (a.rank / a.blocksize);
  for (int64_t begin = 0; begin < a.rank; begin += a.blocksize) {
    const float scale = scales[begin / a.blocksize];
    int64_t i = begin;
    const int64_t end = begin + a.blocksize;
#if defined(__AVX512F__)
    const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(a.table), _mm512_set1_ps(scale));
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (; i + 32 <= end; i += 32) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const __m512i low = _mm512_cvtepu8_epi32(bytes);  // a permutation reads the lowest four bits alone
      const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(low, 4), table);
      const __m512 odd = _mm512_permutexvar_ps(low, table);
      _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(even, first, odd));
      _mm512_storeu_ps(out + i + 16, _mm512_permutex2var_ps(even, second, odd));
    }
#endif
    for (; i < end; i += 2) {
      out[i] = a.table[codes[i / 2] >> 4] * scale;
      out[i + 1] = a.table[codes[i / 2] & 15] * scale;
    }
  }
}

}  // namespace

extern "C" {

// out[t][h][0, rank) = query[t][h] times head h's key matrix. Strides of query and out in floats, their last dimension dense.
void absorb_queries(const PackedHeads* p, const float* query, int64_t query_token, int64_t query_head, float* out,
                    int64_t out_token, int64_t out_head, int64_t tokens) {
  const PackedHeads& a = *p;
#pragma omp parallel for if (tokens * a.heads * a.plain * a.rank > kParallelWork)
  for (int64_t h = 0; h < a.heads; ++h) {
    float row[kMaxRank];
    for (int64_t t = 0; t < tokens; ++t) std::fill_n(out + t * out_token + h * out_head, a.rank, 0.0f);
    for (int64_t n = 0; n < a.plain; ++n) {
      decode(a, h * (a.plain + a.width) + n, row);
      for (int64_t t = 0; t < tokens; ++t) {
        const float weight = query[t * query_token + h * query_head + n];
        float* to = out + t * out_token + h * out_head;
#pragma omp simd
        for (int64_t i = 0; i < a.rank; ++i) to[i] += weight * row[i];
      }
    }
  }
}

// out[t][h][0, width) = head h's value matrix times sums[t][h]; both dense.
void values_of_sums(const PackedHeads* p, const float* sums, float* out, int64_t tokens) {
  const PackedHeads& a = *p;
#pragma omp parallel for if (tokens * a.heads * a.width * a.rank > kParallelWork)
  for (int64_t h = 0; h < a.heads; ++h) {
    float row[kMaxRank];
    for (int64_t n = 0; n < a.width; ++n) {
      decode(a, h * (a.plain + a.width) + a.plain + n, row);
      for (int64_t t = 0; t < tokens; ++t) {
        const float* from = sums + (t * a.heads + h) * a.rank;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < a.rank; ++i) sum += from[i] * row[i];
        out[(t * a.heads + h) * a.width + n] = sum;
      }
    }
  }
}

}  // extern "C"
