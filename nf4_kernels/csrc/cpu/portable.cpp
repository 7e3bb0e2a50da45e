/* Kernels for any CPU, in C++ with the vectors of GCC and clang: of 16 bytes, SSE2's on x86-64 and NEON's on arm. */
#include "float_rows.h"
#include "gated_delta_tile.h"
#include "mamba2_kernels.h"

namespace nf4 {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef uint64_t TwoPairs __attribute__((vector_size(16)));

/* What the two codes of each byte stand for, as the bits of two floats: half as many look-ups as codes. */
struct Pairs {
  uint64_t of[256];
  explicit Pairs(const float* codes) {
    for (int byte = 0; byte < 256; ++byte) {
      const float pair[2] = {codes[byte >> 4], codes[byte & 15]};
      memcpy(&of[byte], pair, sizeof pair);
    }
  }
};

/* 4 times `quads` numbers of one block, from whole bytes. */
void decode_quads(const Pairs& pairs, const uint8_t* from, int64_t quads, float scale, float* to) {
  for (int64_t i = 0; i < quads; ++i) {
    const TwoPairs bits = {pairs.of[from[2 * i]], pairs.of[from[2 * i + 1]]};
    const Four values = (Four)bits * scale;
    memcpy(to + 4 * i, &values, sizeof values);
  }
}

void decode(const Nf4Weight* w, int64_t begin, int64_t end, void* out, int32_t dtype) {
  static const Pairs nf4(kCodes), fp4(kFp4Codes);
  const Pairs& pairs = w->table == NF4_TABLE_FP4 ? fp4 : nf4;
  int64_t i = begin;
  for (int64_t block = begin / w->blocksize; i < end; ++block) {
    int64_t stop = (block + 1) * w->blocksize;
    if (stop > end) stop = end;
    const float scale = scale_of(w, block);
    if (dtype == NF4_FLOAT32) {
      /* The first may be the second of its byte. */
      for (; i % 2; ++i) store_as(out, i - begin, code_of(w, i) * scale, dtype);
      const int64_t quads = (stop - i) / 4;
      decode_quads(pairs, w->packed + i / 2, quads, scale, (float*)out + (i - begin));
      i += 4 * quads;
    }
    for (; i < stop; ++i) store_as(out, i - begin, code_of(w, i) * scale, dtype);
  }
}

struct Lanes {
  using Vector = Four;
  static constexpr int kWidth = 4, kTokens = 2;
  static constexpr int rows(int tokens) { return tokens == 1 ? kPanelRows : 4; }
  static inline Vector zero() { return Vector{}; }
  static inline Vector load(const float* from) {
    Vector found;
    memcpy(&found, from, sizeof found);
    return found;
  }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
  template <int R>
  static inline void sums(const Vector* total, float* to) {
    for (int r = 0; r < R; ++r) to[r] = (total[r][0] + total[r][2]) + (total[r][1] + total[r][3]);
  }
};

void emit(const float* sums, const void* bias, void* out, int32_t dtype, int64_t n, int64_t m0, int count,
          int64_t row0, int rows) {
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < rows; ++j) {
      float value = sums[i * kUnit + j];
      if (bias) value += load_as(bias, row0 + j, dtype);
      store_as(out, (m0 + i) * n + row0 + j, value, dtype);
    }
  }
}

void widen(const uint16_t* from, float* to, int64_t k, int64_t stride) {
  for (int64_t i = 0; i < k; ++i) to[i] = from_bf16(from[i]);
  for (int64_t i = k; i < stride; ++i) to[i] = 0;
}

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.name = "portable";
    k.gated_delta = gated_delta_portable;
    k.mamba2 = &mamba2_portable;
    k.decode = decode;
    k.dot = dot<Lanes>;
    k.emit = emit;
    k.widen = widen;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
