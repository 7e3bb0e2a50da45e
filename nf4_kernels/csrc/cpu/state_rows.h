/* Rows of floats in the kernels of layers with states, and their causal convolution. A kernel file defines Lanes, a vector of
 * floats, and multiply_add(a, b, c) = a * b + c of it, before it includes this; static for the reason given in kernels.h. */
#pragma once

#include "exponential.h"
#include "kernels.h"
#include "sequence_rows.h"

namespace nf4 {
namespace {

constexpr int kLanes = sizeof(Lanes) / sizeof(float);

Lanes load(const float* from) {
  Lanes value;
  memcpy(&value, from, sizeof value);
  return value;
}

void store(float* to, Lanes value) { memcpy(to, &value, sizeof value); }

Lanes all(float value) { return Lanes{} + value; }

void widen_row(const void* from, int64_t at, float* to, int n, int32_t dtype) {
  if (dtype == NF4_FLOAT32) {
    memcpy(to, (const float*)from + at, n * sizeof(float));
  } else if (dtype == NF4_BFLOAT16) {
    const uint16_t* halves = (const uint16_t*)from + at;
    for (int i = 0; i < n; ++i) to[i] = from_bf16(halves[i]);
  } else {
    for (int i = 0; i < n; ++i) to[i] = load_as(from, at + i, dtype);
  }
}

void round_row(float* row, int n, int32_t dtype) {
  if (dtype == NF4_BFLOAT16) {
    for (int i = 0; i < n; ++i) row[i] = from_bf16(to_bf16(row[i]));
  } else if (dtype == NF4_FLOAT16) {
    for (int i = 0; i < n; ++i) row[i] = from_fp16(to_fp16(row[i]));
  }
}

float sum_of_squares(const float* row, int n) {
  Lanes sum{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = multiply_add(load(row + i), load(row + i), sum);
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  for (; i < n; ++i) total += row[i] * row[i];
  return total;
}

void scale_row(float* row, int n, float factor) {
  for (int i = 0; i < n; ++i) row[i] *= factor;
}

/* mixed[tokens][stride]: channels [first, first + dim) after convolution and SiLU, rounded; their latest inputs go to the
 * slot. room: (2 taps + tokens) * dim floats. */
void convolve(const Convolution& c, const SequenceRows& rows, int64_t first, int dim, float* mixed, int64_t stride,
              float* room) {
  const int taps = c.taps, old = taps - 1;
  float* weights = room;               /* [taps][dim] */
  float* inputs = room + taps * dim;   /* [old + tokens][dim] */
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < taps; ++j) weights[j * dim + i] = load_as(c.weight, (first + i) * taps + j, c.weight_dtype);
  }
  const int64_t state = rows.slot * c.slot_stride + first * old;
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < old; ++j) {
      inputs[j * dim + i] = rows.continues ? load_as(c.state, state + i * old + j, c.dtype) : 0.0f;
    }
  }
  for (int t = 0; t < rows.tokens; ++t) {
    widen_row(c.x, (rows.row + t) * c.stride + first, inputs + (old + t) * dim, dim, c.dtype);
  }
  for (int t = 0; t < rows.tokens; ++t) {
    float* sums = mixed + t * stride;
    for (int i = 0; i < dim; ++i) sums[i] = 0;
    for (int j = 0; j < taps; ++j) {
      const float* weight = weights + j * dim;
      const float* input = inputs + (t + j) * dim;
      for (int i = 0; i < dim; ++i) sums[i] += weight[i] * input[i];
    }
    for (int i = 0; c.bias && i < dim; ++i) sums[i] += c.bias[first + i];
    for (int i = 0; i < dim; ++i) sums[i] = silu(sums[i]);
    round_row(sums, dim, c.dtype);
  }
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < old; ++j) {
      store_as(c.state, state + i * old + j, inputs[(rows.tokens + j) * dim + i], c.dtype);
    }
  }
}

/* As torch's softplus. */
float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

}  // namespace
}  // namespace nf4
