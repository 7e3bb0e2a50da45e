/* Kernels in plain C++ for any CPU. */
#include "kernels.h"

namespace nf4 {
namespace {

void decode(const Nf4Weight* w, int64_t begin, int64_t end, void* out, int32_t dtype) {
  int64_t i = begin;
  while (i < end) {
    int64_t block = i / w->blocksize;
    int64_t stop = (block + 1) * w->blocksize;
    if (stop > end) stop = end;
    float scale = scale_of(w, block);
    float scaled[16];
    for (int c = 0; c < 16; ++c) scaled[c] = codes_of(w)[c] * scale;
    for (; i < stop; ++i) {
      uint8_t byte = w->packed[i >> 1];
      store_as(out, i - begin, scaled[i & 1 ? byte & 15 : byte >> 4], dtype);
    }
  }
}

void dot(const float* panel, int rows, const Prepared* x, int64_t m0, int count, float* sums) {
  for (int i = 0; i < count; ++i) {
    const float* a = x->x + (m0 + i) * x->stride;
    for (int j = 0; j < rows; ++j) {
      const float* b = panel + j * x->stride;
      /* Sixteen partial sums: independent chains, which the compiler turns into vectors. */
      float partial[16] = {};
      for (int64_t k = 0; k < x->stride; k += 16) {
        for (int l = 0; l < 16; ++l) partial[l] += a[k + l] * b[k + l];
      }
      for (int width = 8; width; width /= 2) {
        for (int l = 0; l < width; ++l) partial[l] += partial[l + width];
      }
      sums[i * kUnit + j] = partial[0];
    }
  }
}

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
    k.decode = decode;
    k.dot = dot;
    k.emit = emit;
    k.widen = widen;
    return k;
  }();
  return &kernels;
}

}  // namespace nf4
