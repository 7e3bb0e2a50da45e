/* Weights in compact bfloat16: 12 bits each, and nothing is lost.
 *
 * The high byte of a bfloat16 is its sign and most of its exponent, and of those a weight has few: the 16 that come most often
 * have codes of 4 bits. The low byte stays. What has another high byte is an exception: it counts as zero there, and stands
 * in a list. See docs/adr/0033-compact-bfloat16-on-cpu.md. */
#pragma once

#include "kernels.h"

namespace nf4 {

/* 32 columns of a row: their low bytes, then their codes, two a byte, those of places 16 .. 31 in the high nibbles. */
constexpr int64_t kCompactColumns = 32, kCompactGroup = 48;

/* Where column c of 32 lies: bytes as AVX2's unpacking takes them. */
static inline int64_t compact_place(int64_t c) { return c < 8 || c >= 24 ? c : c ^ 24; }

struct CompactBf16 {
  const uint8_t* groups;     /* [n, k / 32] groups */
  const uint8_t* high_bytes; /* [16], what the codes stand for */
  const int32_t* first;      /* [n + 1], where each row's exceptions begin; null where there are none */
  const int32_t* columns;    /* of the exceptions */
  const uint16_t* values;    /* of the exceptions, in bfloat16 */
};

/* Columns 32 g .. 32 g + 31 of a row, without exceptions. */
static inline void expand_group(const uint8_t* group, const uint8_t* high_bytes, float* to) {
  for (int64_t c = 0; c < kCompactColumns; ++c) {
    const int64_t place = compact_place(c);
    const int code = group[32 + place % 16] >> (place < 16 ? 0 : 4) & 15;
    to[c] = from_bf16((uint16_t)(high_bytes[code] << 8 | group[place]));
  }
}

}  // namespace nf4
