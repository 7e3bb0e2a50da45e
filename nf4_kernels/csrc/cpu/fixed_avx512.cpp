/* GEMMs in 16-bit fixed point with AVX-512 without VNNI. */
#include "fixed_avx512.h"

namespace nf4 {
namespace {

struct MultiplyAndAdd {
  static inline void add(__m512i& sum, __m512i a, __m512i b) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  }
};

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_float32_kernels();
    k.name = "avx512";
    use_fixed<MultiplyAndAdd>(&k);
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
