/* What one instruction set offers to the shared driver (linear.cpp), and the helpers every kernel file uses.
 *
 * Files differ in their -m flags, so everything here is static: an inline function with external linkage, compiled
 * once with AVX-512, could be the copy the linker keeps for a CPU without it. Kernel files use no std templates
 * for the same reason. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "params.h"

namespace nf4 {

/* Rows of a weight that one step of the driver handles, and the row stride of the float32 sums it hands to emit. */
constexpr int kUnit = 32;
/* Rows decoded at a time for `dot`: 8 rows of 576..1536 floats stay in L1. */
constexpr int kPanelRows = 8;
/* Rows of x per call of `dot`. */
constexpr int kDotRows = 48;

/* Rows of x that the results in tile registers hold. */
constexpr int kTileRows = 32;

/* x as the kernels of one instruction set want it. */
struct Prepared {
  const float* x;     /* float32, row stride `stride`, zeros behind column k */
  int64_t stride;     /* k rounded up to 16 */
  const void* order;  /* x in the order of the `fused` or `tiles` kernel, where the plan uses one */
  int64_t m;
  int64_t k;
};

struct DeltaTile;
struct Mamba2Kernels;

struct Kernels {
  const char* name;

  /* The gated delta rule: gated_delta_tile.h. */
  void (*gated_delta)(const DeltaTile* tile, int head, float* wide, float* room);
  const Mamba2Kernels* mamba2;

  /* Elements [begin, end) of w to out[0 ...] in dtype. */
  void (*decode)(const Nf4Weight* w, int64_t begin, int64_t end, void* out, int32_t dtype);

  /* sums[i * kUnit + j] = x row (m0 + i) . panel row j, over `stride` columns; rows <= kPanelRows. */
  void (*dot)(const float* panel, int rows, const Prepared* x, int64_t m0, int count, float* sums);

  /* out[(m0 + i) * n + row0 + j] = sums[i * kUnit + j] + bias[row0 + j], rounded to dtype. */
  void (*emit)(const float* sums, const void* bias, void* out, int32_t dtype, int64_t n, int64_t m0, int count,
               int64_t row0, int rows);

  /* bfloat16 to float32, `stride` - k zeros appended. */
  void (*widen)(const uint16_t* from, float* to, int64_t k, int64_t stride);

  /* Few rows of x (m <= fused_rows), k and blocksize multiples of 64: decodes in registers. Null where missing. */
  int fused_rows;
  void (*fused_order)(const Prepared* x, float* order);
  void (*fused)(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, float* scratch, float* sums);

  /* The same for bfloat16 weights; k a multiple of 32. */
  void (*bf16_order)(const Prepared* x, float* order);
  void (*bf16_rows)(const uint16_t* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows, float* sums);

  /* Matrix tiles (AMX) or fixed point (fixed.h), k and blocksize multiples of 64. `split` keeps two bfloat16 parts of x and
   * of w; in fixed point it changes nothing. */
  bool fixed_point;
  int tiles_from; /* least m that takes this path; 0 where missing */
  int bf16_tiles_from;
  void (*tiles_begin)();
  void (*tiles_end)();
  /* Tile column t (16 rows of x) of the prepared operand. natural: columns in order, as bfloat16 weights need. */
  void (*tiles_order)(const Prepared* x, int64_t t, bool split, bool natural, void* order);
  /* Columns 64 begin .. 64 end - 1 of up to kUnit rows into a panel; begin = 0 also fills `scales`, for all. */
  void (*tiles_decode)(const Nf4Weight* w, int64_t row0, int rows, int64_t begin, int64_t end, bool split,
                       float* scales, void* panel);
  /* Adds the panel times tile columns t, t + 1 (columns: 1 or 2) of x to `results`, four tiles; begin = 0 sets it. */
  void (*tiles_multiply)(const void* panel, const Prepared* x, int64_t t, int columns, int64_t begin, int64_t end,
                         bool split, float* results);
  void (*tiles_sums)(const float* results, int columns, float* sums);
  /* Both at once for m <= kTileRows; panel is room for 16 KiB. */
  void (*tiles_fused)(const Nf4Weight* w, const Prepared* x, int64_t row0, int rows, bool split, float* scratch,
                      void* panel, float* sums);
  /* Tile columns t, t + 1 times kUnit rows of bfloat16 weights. */
  void (*tiles_bf16)(const uint16_t* w, const Prepared* x, int64_t t, int columns, float* sums);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512vnni_kernels();
const Kernels* amx_kernels();

/* The NF4 code book of bitsandbytes. */
alignas(64) static const float kCodes[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

/* That of FP4: a sign, and 0, 1/16, 8, 12, 4, 6, 2, 3 by 12. */
alignas(64) static const float kFp4Codes[16] = {
    0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f,
    0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
    0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f,
    -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f,
};

/* What the 16 codes of a weight stand for, aligned to 64 bytes. */
static inline const float* codes_of(const Nf4Weight* w) { return w->table == NF4_TABLE_FP4 ? kFp4Codes : kCodes; }

/* Where block i's scale lies in the whole weight, counted from its first group; see Nf4Weight. */
static inline int64_t place_of(const Nf4Weight* w, int64_t i) {
  int64_t place = w->group_offset + i;
  if (w->group_skip) place += i / (w->k / w->blocksize) * w->group_skip;
  return place;
}

/* Scale of block i. The build turns FMA contraction off, so that this rounds twice, as bitsandbytes does. */
static inline float scale_of(const Nf4Weight* w, int64_t i) {
  if (!w->absmax_8bit) return w->absmax[i];
  const int64_t group = place_of(w, i) / 256;
  float product = w->absmax_code[w->absmax_8bit[i]] * w->absmax[group];
  return product + w->absmax_offset[group * w->offset_stride];
}

static inline float code_of(const Nf4Weight* w, int64_t i) {
  uint8_t byte = w->packed[i >> 1];
  return codes_of(w)[i & 1 ? byte & 15 : byte >> 4];
}

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline uint16_t to_bf16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

static inline uint16_t to_fp16(float value) {
  uint32_t bits = float_to_bits(value);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x1ff));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {
    /* Subnormal: adding 0.5 leaves the rounded count of 2^-24 steps in the low bits of the sum. */
    return (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}

static inline float from_fp16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000) << 16, rest = value & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) {
    float magnitude = (float)rest * 0x1p-24f;
    return bits_to_float(sign | float_to_bits(magnitude));
  }
  return bits_to_float(sign | ((rest << 13) + 0x38000000));
}

static inline void store_as(void* out, int64_t i, float value, int32_t dtype) {
  if (dtype == NF4_FLOAT32) {
    ((float*)out)[i] = value;
  } else {
    ((uint16_t*)out)[i] = dtype == NF4_FLOAT16 ? to_fp16(value) : to_bf16(value);
  }
}

static inline float load_as(const void* from, int64_t i, int32_t dtype) {
  if (dtype == NF4_FLOAT32) return ((const float*)from)[i];
  uint16_t half = ((const uint16_t*)from)[i];
  return dtype == NF4_FLOAT16 ? from_fp16(half) : from_bf16(half);
}

}  // namespace nf4
