/* Mamba2 over the tokens of sequences. */
#pragma once

#include "mamba2_kernels.h"
#include "state_rows.h"

namespace nf4 {
namespace {

void mamba2_convolve(const MambaBlock* block, const SequenceRows* rows, int64_t first, int count, float* room) {
  const Nf4Mamba2* p = block->p;
  const Convolution convolution{p->xbc,       p->xbc_stride, p->conv_weight, p->conv_bias, p->conv_state,
                                p->conv_slot, p->taps,       p->dtype,       NF4_FLOAT32};
  float* mixed = block->mixed + (rows->row - block->first_row) * block->channels + first;
  convolve(convolution, *rows, first, count, mixed, block->channels, room);
}

/* N vectors of columns of S [rows][stride] become decay S + b^T delta; y = c S. */
template <int N>
void advance_columns(float* state, int rows, int stride, int at, float decay, const float* b, const float* c,
                     const float* delta, float* y) {
  Lanes sum[N], added[N];
  for (int i = 0; i < N; ++i) {
    sum[i] = Lanes{};
    added[i] = load(delta + at + i * kLanes);
  }
  const Lanes kept = all(decay);
  for (int r = 0; r < rows; ++r) {
    float* row = state + (int64_t)r * stride + at;
    const Lanes in = all(b[r]), out = all(c[r]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const Lanes value = multiply_add(in, added[i], kept * load(row + i * kLanes));
      store(row + i * kLanes, value);
      sum[i] = multiply_add(out, value, sum[i]);
    }
  }
  for (int i = 0; i < N; ++i) store(y + at + i * kLanes, sum[i]);
}

void advance_state(float* state, int rows, int columns, float decay, const float* b, const float* c, const float* delta,
                   float* y) {
  int at = 0;
  for (; at + 4 * kLanes <= columns; at += 4 * kLanes) advance_columns<4>(state, rows, columns, at, decay, b, c, delta, y);
  for (; at + kLanes <= columns; at += kLanes) advance_columns<1>(state, rows, columns, at, decay, b, c, delta, y);
  for (; at < columns; ++at) {
    float sum = 0;
    for (int r = 0; r < rows; ++r) {
      float* value = state + (int64_t)r * columns + at;
      *value = decay * *value + b[r] * delta[at];
      sum += c[r] * *value;
    }
    y[at] = sum;
  }
}

void mamba2_advance(const MambaBlock* block, const SequenceRows* rows, int head, float* delta) {
  const Nf4Mamba2* p = block->p;
  const int dim = p->head_dim, states = p->state_dim, group = head / (p->heads / p->groups);
  const int64_t width = (int64_t)p->heads * dim, keys = (int64_t)p->groups * states;
  float* state = p->state + rows->slot * p->state_slot + (int64_t)head * states * dim;
  if (!rows->continues) memset(state, 0, (int64_t)states * dim * sizeof(float));
  const float rate_of_decay = -__builtin_expf(p->a_log[head]), skip = p->d[head];
  for (int t = 0; t < rows->tokens; ++t) {
    const int64_t row = rows->row + t, place = row - block->first_row;
    const float* mixed = block->mixed + place * block->channels;
    const float* x = mixed + (int64_t)head * dim;
    const float* b = mixed + width + (int64_t)group * states;
    float* y = block->y + place * width + (int64_t)head * dim;
    float rate = softplus(load_as(p->dt, row * p->dt_stride + head, p->dtype) + p->dt_bias[head]);
    rate = rate < p->dt_min ? p->dt_min : (rate > p->dt_max ? p->dt_max : rate);
    for (int i = 0; i < dim; ++i) delta[i] = rate * x[i];
    advance_state(state, states, dim, __builtin_expf(rate_of_decay * rate), b, b + keys, delta, y);
    for (int i = 0; i < dim; ++i) y[i] += skip * x[i];
  }
}

void mamba2_normalise(const MambaBlock* block, int64_t row, int group, float* gate) {
  const Nf4Mamba2* p = block->p;
  const int64_t width = (int64_t)p->heads * p->head_dim, first = group * (width / p->norm_groups);
  const int n = (int)(width / p->norm_groups);
  float* y = block->y + (row - block->first_row) * width + first;
  widen_row(p->z, row * p->z_stride + first, gate, n, p->dtype);
  for (int i = 0; i < n; ++i) gate[i] = silu(gate[i]);
  if (!p->norm_before_gate || !p->norm_weight) {
    for (int i = 0; i < n; ++i) y[i] *= gate[i];
  }
  if (p->norm_weight) {
    scale_row(y, n, 1.0f / __builtin_sqrtf(sum_of_squares(y, n) / (float)n + p->eps));
    for (int i = 0; i < n; ++i) y[i] *= p->norm_weight[first + i];
    for (int i = 0; p->norm_before_gate && i < n; ++i) y[i] *= gate[i];
  }
  for (int i = 0; i < n; ++i) store_as(p->out, row * width + first + i, y[i], p->dtype);
}

}  // namespace
}  // namespace nf4
