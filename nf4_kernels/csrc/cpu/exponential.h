/* e^x and what is made of it, in a form that compilers vectorize; static for the reason given in kernels.h. */
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace nf4 {
namespace {

/* e^x for |x| <= 87, which the arguments beyond that count as; plain arithmetic that the compiler vectorizes. */
inline float exp_clamped(float x) {
  x = x < -87.0f ? -87.0f : (x > 87.0f ? 87.0f : x);
  const float shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = (float_to_bits(shifted) - (0x4B400000u - 127u)) << 23;
  return p * bits_to_float(bits);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_clamped(-x)); }

inline float silu(float x) { return x / (1.0f + exp_clamped(-x)); }

}  // namespace
}  // namespace nf4
