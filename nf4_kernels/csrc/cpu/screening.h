/* Which rows of a weight can have the largest product with x: an 8-bit copy of the weight says so, with a bound on its error.
 *
 * Row r of the weight is scales[r] * codes[r] plus a rest. By Cauchy and Schwarz the rest changes the product by no more than
 * the rest's norm times that of x. See docs/adr/0034-greedy-output-layer-on-cpu.md. */
#pragma once

#include "kernels.h"

namespace nf4 {

struct Screening {
  const int8_t* codes; /* [n, k] */
  const float* scales; /* [n] */
  const float* norms;  /* [n], of the rows scales[r] * codes[r], rounded up */
  const float* errors; /* [n], by how much a product with an x of norm 1 can be off, rounding of float32 sums included */
};

/* x in 16 bits: row i is steps[i] * x[i] plus a rest. */
struct ScreenedX {
  const int16_t* x;   /* [m, k] */
  const float* steps; /* [m] */
  const float* norms; /* [m], of the rows as they are, rounded up */
  const float* rests; /* [m], norms of the rests, rounded up */
  int64_t m, k;
};

/* By how much a result in float32 can be off that has been rounded a few times. */
constexpr float kRounding = 4.8e-7f;

/* The same for products too small for float32: a step times a scale is off by 2^-150 at most, and is multiplied by less
 * than 2^31. */
constexpr float kUnderflow = 0x1p-118f;

/* Sets screen_rows, with AVX2 also where there is more: codes of 8 bits come from memory about as fast as it multiplies. */
void use_screening_avx2(Kernels* kernels);

}  // namespace nf4
