/* The gated delta rule and Mamba2 with AVX-512. */
#include <immintrin.h>

namespace nf4 {
namespace {

typedef float Lanes __attribute__((vector_size(64)));

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

}  // namespace
}  // namespace nf4

#include "gated_delta_rule.h"
#include "mamba2_scan.h"

namespace nf4 {

void gated_delta_avx512(const DeltaTile* tile, int head, float* wide, float* room) { key_head(*tile, head, wide, room); }

const Mamba2Kernels mamba2_avx512{mamba2_convolve, mamba2_advance, mamba2_normalise};

}  // namespace nf4
