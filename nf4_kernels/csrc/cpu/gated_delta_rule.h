/* The gated delta rule of one key head and its value heads, over the tokens of one sequence. */
#pragma once

#include "gated_delta_tile.h"
#include "kernels.h"
#include "state_rows.h"

namespace nf4 {
namespace {

constexpr float kL2Eps = 1e-6f;

Convolution convolution_of(const Nf4GatedDelta* p) {
  return {p->qkv, p->qkv_stride, p->conv_weight, nullptr, p->conv_state, p->conv_slot, p->taps, p->dtype, p->conv_dtype};
}

/* The latest token, by which the state is yet to be advanced: S becomes decay S + k^T delta. */
struct Pending {
  const float* k; /* null where there is none */
  const float* delta;
  float decay;
};

/* Advances N vectors of columns of S by the pending token; then ks = k S and qs = q S, unless k is null. */
template <int N, bool kAdvances, bool kReads>
void pass_over(float* state, int64_t stride, int rows, Pending pending, int at, const float* k, const float* q, float* ks,
               float* qs) {
  Lanes of_k[N], of_q[N], delta[N];
  for (int i = 0; i < N; ++i) {
    of_k[i] = of_q[i] = Lanes{};
    if (kAdvances) delta[i] = load(pending.delta + at + i * kLanes);
  }
  const Lanes kept = all(pending.decay);
  for (int r = 0; r < rows; ++r) {
    float* row = state + r * stride + at;
    const Lanes old_key = all(kAdvances ? pending.k[r] : 0.0f);
    const Lanes key = all(kReads ? k[r] : 0.0f), query = all(kReads ? q[r] : 0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      Lanes value = load(row + i * kLanes);
      if (kAdvances) {
        value = multiply_add(old_key, delta[i], kept * value);
        store(row + i * kLanes, value);
      }
      if (kReads) {
        of_k[i] = multiply_add(key, value, of_k[i]);
        of_q[i] = multiply_add(query, value, of_q[i]);
      }
    }
  }
  for (int i = 0; kReads && i < N; ++i) {
    store(ks + at + i * kLanes, of_k[i]);
    store(qs + at + i * kLanes, of_q[i]);
  }
}

/* pass_over() all columns. */
template <bool kAdvances, bool kReads>
void pass(float* state, int rows, int columns, Pending pending, const float* k, const float* q, float* ks, float* qs) {
  /* As many sums as registers hold. */
  constexpr int kMost = kLanes == 16 ? 8 : 4;
  int c = 0;
  for (; c + kMost * kLanes <= columns; c += kMost * kLanes) {
    pass_over<kMost, kAdvances, kReads>(state, columns, rows, pending, c, k, q, ks, qs);
  }
  for (; c + kLanes <= columns; c += kLanes) {
    pass_over<1, kAdvances, kReads>(state, columns, rows, pending, c, k, q, ks, qs);
  }
  for (; c < columns; ++c) {
    float of_k = 0, of_q = 0;
    for (int r = 0; r < rows; ++r) {
      float* value = state + r * columns + c;
      if (kAdvances) *value = pending.decay * *value + pending.k[r] * pending.delta[c];
      if (kReads) {
        of_k += k[r] * *value;
        of_q += q[r] * *value;
      }
    }
    if (kReads) {
      ks[c] = of_k;
      qs[c] = of_q;
    }
  }
}

/* Writes weight * norm(o) * silu(z) of one token's head, rounded where transformers rounds; gate: room for a row. */
void normalise(const Nf4GatedDelta* p, int64_t row, int head, float* o, float* gate) {
  const int dim = p->value_dim;
  round_row(o, dim, p->dtype);
  scale_row(o, dim, 1.0f / __builtin_sqrtf(sum_of_squares(o, dim) / (float)dim + p->eps));
  round_row(o, dim, p->dtype);
  for (int c = 0; c < dim; ++c) o[c] *= load_as(p->norm_weight, c, p->norm_dtype);
  if (p->norm_dtype != NF4_FLOAT32) round_row(o, dim, p->dtype);
  widen_row(p->z, row * p->z_stride + (int64_t)head * dim, gate, dim, p->dtype);
  for (int c = 0; c < dim; ++c) o[c] *= silu(gate[c]);
  const int64_t at = (row * p->value_heads + head) * dim;
  for (int c = 0; c < dim; ++c) store_as(p->out, at + c, o[c], p->dtype);
}

/* A value head's tokens; q and k [tokens][key_dim] are normalised. A pass over the state advances it by one token and reads it
 * for the next. room: (2 taps + 2 tokens + 3) * value_dim floats. */
void value_head(const DeltaTile& tile, int head, float* state, const float* q, const float* k, float* room) {
  const Nf4GatedDelta* p = tile.p;
  const int rows = p->key_dim, dim = p->value_dim;
  const int64_t first = (int64_t)2 * p->key_heads * rows + (int64_t)head * dim;
  float* v = room;
  float* delta = v + (int64_t)tile.tokens * dim;
  float* o = delta + dim;
  float* read = o + dim;
  convolve(convolution_of(p), tile, first, dim, v, dim, read);
  Pending pending{nullptr, delta, 0};
  for (int t = 0; t < tile.tokens; ++t, q += rows, k += rows, v += dim) {
    const int64_t token = tile.row + t;
    if (pending.k) {
      pass<true, true>(state, rows, dim, pending, k, q, read, o);
    } else {
      pass<false, true>(state, rows, dim, pending, k, q, read, o);
    }
    const float rate = load_as(p->a, token * p->a_stride + head, p->dtype) + p->dt_bias[head];
    const float decay = __builtin_expf(-__builtin_expf(p->a_log[head]) * softplus(rate));
    const float beta = 1.0f / (1.0f + __builtin_expf(-load_as(p->b, token * p->b_stride + head, p->dtype)));
    float qk = 0;
    for (int r = 0; r < rows; ++r) qk += q[r] * k[r];
    for (int c = 0; c < dim; ++c) {
      delta[c] = beta * (v[c] - decay * read[c]);
      o[c] = decay * o[c] + qk * delta[c];
    }
    pending = {k, delta, decay};
    normalise(p, token, head, o, read);
  }
  pass<true, false>(state, rows, dim, pending, nullptr, nullptr, nullptr, nullptr);
}

/* A tile of tokens of one key head. wide: room for a state in float32 where it is stored in 16 bit. */
void key_head(const DeltaTile& tile, int head, float* wide, float* room) {
  const Nf4GatedDelta* p = tile.p;
  const int dim = p->key_dim, group = p->value_heads / p->key_heads;
  float* q = room;
  float* k = q + (int64_t)tile.tokens * dim;
  float* rest = k + (int64_t)tile.tokens * dim;
  convolve(convolution_of(p), tile, (int64_t)head * dim, dim, q, dim, rest);
  convolve(convolution_of(p), tile, (int64_t)(p->key_heads + head) * dim, dim, k, dim, rest);
  const float scale = 1.0f / __builtin_sqrtf((float)dim);
  for (int t = 0; t < tile.tokens; ++t) {
    scale_row(q + t * dim, dim, scale / __builtin_sqrtf(sum_of_squares(q + t * dim, dim) + kL2Eps));
    scale_row(k + t * dim, dim, 1.0f / __builtin_sqrtf(sum_of_squares(k + t * dim, dim) + kL2Eps));
  }
  const int64_t elements = (int64_t)dim * p->value_dim;
  for (int own = head * group; own < (head + 1) * group; ++own) {
    const int64_t at = tile.slot * p->state_slot + own * elements;
    const bool narrow = p->state_dtype != NF4_FLOAT32;
    float* state = narrow ? wide : (float*)p->state + at;
    if (!tile.continues) {
      memset(state, 0, elements * sizeof(float));
    } else if (narrow) {
      widen_row(p->state, at, state, (int)elements, p->state_dtype);
    }
    value_head(tile, own, state, q, k, rest);
    for (int64_t i = 0; narrow && i < elements; ++i) store_as(p->state, at + i, state[i], p->state_dtype);
  }
}

}  // namespace
}  // namespace nf4
