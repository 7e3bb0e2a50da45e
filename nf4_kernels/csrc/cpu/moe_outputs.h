/* From the sums of experts' GEMMs, sorted by expert, to what a mixture gives: activations and weighted sums. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "kernels.h"

namespace nf4 {

constexpr int32_t kSwigluOai = 3; /* an activation beside those of params.h: gpt-oss' */

/* What a gate and an up give; in two steps, because models round the first. */
inline float activated(float gate, int32_t activation) {
  if (activation == NF4_SILU) return gate * sigmoid(gate);
  if (activation == NF4_GELU_TANH) return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate));
  gate = gate > 7.0f ? 7.0f : gate;
  return gate * sigmoid(1.702f * gate);
}

inline float multiplier(float up, int32_t activation) {
  if (activation != kSwigluOai) return up;
  return (up > 7.0f ? 7.0f : (up < -7.0f ? -7.0f : up)) + 1.0f;
}

inline float rounded(float value, int32_t dtype) {
  if (dtype == NF4_FLOAT32) return value;
  return dtype == NF4_FLOAT16 ? from_fp16(to_fp16(value)) : from_bf16(to_bf16(value));
}

/* Writes one token's outputs, see nf4_cpu_moe(). */
struct MoeOutputs {
  const float* routing;
  void* out;
  int64_t top_k, n;
  int32_t dtype, activation;

  /* sums [choices, n] in dtype; place: where each choice's are, -1 where it has none. */
  void write(const char* sums, const int64_t* place, int64_t token) const {
    place += token * top_k;
    if (routing) return add(sums, place, token);
    const int64_t width = dtype == NF4_FLOAT32 ? 4 : 2, columns = activation ? n / 2 : n;
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t row = (token * top_k + j) * columns;
      if (place[j] < 0) {
        memset(static_cast<char*>(out) + row * width, 0, (size_t)(columns * width));
      } else if (activation) {
        gate(sums, place[j] * n, row);
      } else {
        memcpy(static_cast<char*>(out) + row * width, sums + place[j] * n * width, (size_t)(columns * width));
      }
    }
  }

 private:
  void gate(const char* sums, int64_t from, int64_t to) const {
    const int64_t half = n / 2;
    if (dtype == NF4_FLOAT32) {
      const float* gates = reinterpret_cast<const float*>(sums) + from;
      float* result = static_cast<float*>(out) + to;
      for (int64_t c = 0; c < half; ++c) result[c] = activated(gates[c], activation) * multiplier(gates[half + c], activation);
      return;
    }
    for (int64_t c = 0; c < half; ++c) {
      const float bent = rounded(activated(load_as(sums, from + c, dtype), activation), dtype);
      const float up = rounded(multiplier(load_as(sums, from + half + c, dtype), activation), dtype);
      store_as(out, to + c, bent * up, dtype);
    }
  }

  void add(const char* sums, const int64_t* place, int64_t token) const {
    constexpr int64_t kColumns = 256;
    float total[kColumns];
    for (int64_t first = 0; first < n; first += kColumns) {
      const int64_t columns = n - first < kColumns ? n - first : kColumns;
      memset(total, 0, sizeof total);
      for (int64_t j = 0; j < top_k; ++j) {
        if (place[j] < 0) continue;
        const float weight = routing[token * top_k + j];
        const int64_t from = place[j] * n + first;
        if (dtype == NF4_FLOAT32) {
          const float* row = reinterpret_cast<const float*>(sums) + from;
          for (int64_t c = 0; c < columns; ++c) total[c] += weight * row[c];
        } else {
          for (int64_t c = 0; c < columns; ++c) total[c] += weight * load_as(sums, from + c, dtype);
        }
      }
      for (int64_t c = 0; c < columns; ++c) store_as(out, token * n + first + c, total[c], dtype);
    }
  }
};

}  // namespace nf4
