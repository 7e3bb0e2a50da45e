/* GEMMs in 16-bit fixed point: what the kernels of all instruction sets share; static as kernels.h explains.
 *
 * Integers of 16 bits are multiplied pairwise at about twice the rate of floats. A code counts as one of sixteen integers of
 * up to kTop, and 64 columns of a row of x as integers times a scale of their own. Their products are summed exactly in
 * 32 bits: the scale of x is chosen such that no sum of 64 of them can overflow. After 64 columns, which lie in one
 * quantization block, the sum becomes a float and is multiplied by both scales. See docs/adr/0027-fixed-point-on-cpu.md. */
#pragma once

#include "kernels.h"

namespace nf4 {

/* Near here the code book lies closest to integers: none is off by more than 5.4e-5 of 1. More bits would be taken from x. */
constexpr int kTop = 6283;

/* round(code * kTop), as the bytes that look-ups give. */
alignas(16) static const int16_t kFixedCodes[16] = {-6283, -4374, -3299, -2481, -1787, -1161, -572, 0,
                                                    500,   1011,  1546,  2123,  2769,  3535,  4542, 6283};

/* FP4's values are whole parts of 192, so that these are exact: 6144 is 32 times that. */
alignas(16) static const int16_t kFixedFp4Codes[16] = {0, 32,  4096,  6144,  2048,  3072,  1024,  1536,
                                                       0, -32, -4096, -6144, -2048, -3072, -1024, -1536};

/* The integers of a weight's codes, and what each counts as. */
static inline const int16_t* fixed_codes_of(const Nf4Weight* w) {
  return w->table == NF4_TABLE_FP4 ? kFixedFp4Codes : kFixedCodes;
}
static inline float fixed_unit_of(const Nf4Weight* w) { return w->table == NF4_TABLE_FP4 ? 1.0f / 6144 : 1.0f / kTop; }

/* Limits of 64 columns of x in fixed point: the sum of their magnitudes, 32 for rounding below (2^31 - 1) / kTop, and each. */
constexpr float kMostSum = 341700.0f;
constexpr float kMostEach = 32767.0f;

/* Sixteen rows of x (a tile column): for each 64 columns 32 pairs of them, sixteen rows a pair, then sixteen scales. */
constexpr int64_t kTileGroup = 32 * 64 + 64;
/* 64 columns of a panel: kUnit rows of 64 integers, then their scales. */
constexpr int64_t kPanelGroup = kUnit * 128 + kUnit * 4;

/* Scale of x's 64 columns with this sum of magnitudes and this largest one, and its inverse. Below float's normal numbers
 * columns count as zeros. Columns that are not finite make the scale so, and with it every result. */
static inline float fixed_scale(float sum, float largest, float* inverse) {
  const float by_sum = sum * (1.0f / kMostSum), by_each = largest * (1.0f / kMostEach);
  const float scale = by_sum > by_each || by_sum != by_sum ? by_sum : by_each;
  *inverse = scale < 1.17549435e-38f ? 0.0f : 1.0f / scale;
  return scale;
}

namespace {

/* x of few tokens in the order of a `fused` kernel: integers [m, k], then scales [m, k / 64]. */
struct FewTokens {
  const int16_t* columns;
  const float* scales;
  explicit FewTokens(const Prepared* x)
      : columns((const int16_t*)x->order), scales((const float*)((const char*)x->order + x->m * x->k * 2)) {}
};

/* Up to kTileRows rows of x: 64 columns after 64 are decoded and multiplied. */
template <auto decode_panel, auto multiply, auto sums_of>
void few_tiles(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, bool split, float* scratch, void* panel,
               float* sums) {
  alignas(64) float results[1024];
  const int columns = x->m > 16 ? 2 : 1;
  for (int64_t g = 0; g < w->k / 64; ++g) {
    decode_panel(w, row0, rows, g, g + 1, split, scratch, panel);
    multiply(panel, x, 0, columns, g, g + 1, split, results);
  }
  sums_of(results, columns, sums);
}

inline void no_state() {}

}  // namespace

}  // namespace nf4
