/* The gated delta rule and Mamba2, with the widest vectors of the instruction set that a source is compiled for. */
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nf4 {
namespace {

#if defined(__AVX512F__)
typedef float Lanes __attribute__((vector_size(64)));

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__)
typedef float Lanes __attribute__((vector_size(32)));

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
typedef float Lanes __attribute__((vector_size(16)));

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }
#endif

}  // namespace
}  // namespace nf4

#include "gated_delta_rule.h"
#include "mamba2_scan.h"

namespace nf4 {

#if defined(__AVX512F__)
#define NF4_OF_ISA(name) name##_avx512
#elif defined(__AVX2__)
#define NF4_OF_ISA(name) name##_avx2
#else
#define NF4_OF_ISA(name) name##_portable
#endif

void NF4_OF_ISA(gated_delta)(const DeltaTile* tile, int head, float* wide, float* room) {
  key_head(*tile, head, wide, room);
}

const Mamba2Kernels NF4_OF_ISA(mamba2){mamba2_convolve, mamba2_advance, mamba2_normalise};

}  // namespace nf4
