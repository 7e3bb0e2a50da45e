/* GEMMs in 16-bit fixed point with AVX-512's VNNI: one instruction multiplies pairs of integers and adds. */
#include "fixed_avx512.h"

namespace nf4 {
namespace {

struct Vnni {
  /* GCC 12 copies every sum around the intrinsic for this. */
  static inline void add(__m512i& sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  }
};

}  // namespace

const Kernels* avx512vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_float32_kernels();
    k.name = "avx512vnni";
    use_fixed<Vnni>(&k);
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
