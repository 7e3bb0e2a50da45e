/* The gated delta rule of one key head and its value heads, over the tokens of one sequence. A kernel file defines Lanes, a
 * vector of floats, and multiply_add(a, b, c) = a * b + c of it, before it includes this; static for the reason given in
 * kernels.h. */
#pragma once

#include "exponential.h"
#include "gated_delta_tile.h"
#include "kernels.h"

namespace nf4 {
namespace {

constexpr int kLanes = sizeof(Lanes) / sizeof(float);
constexpr float kL2Eps = 1e-6f;

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

/* mixed[tokens][dim]: channels [first, first + dim) after convolution and SiLU, rounded; their latest inputs go to the slot.
 * room: (2 taps + tokens) * dim floats. */
void convolve(const DeltaTile& tile, int64_t first, int dim, float* mixed, float* room) {
  const Nf4GatedDelta* p = tile.p;
  const int taps = p->taps, old = taps - 1;
  float* weights = room;               /* [taps][dim] */
  float* inputs = room + taps * dim;   /* [old + tokens][dim] */
  for (int c = 0; c < dim; ++c) {
    for (int j = 0; j < taps; ++j) weights[j * dim + c] = load_as(p->conv_weight, (first + c) * taps + j, p->conv_dtype);
  }
  const int64_t state = tile.slot * p->conv_slot + first * old;
  for (int c = 0; c < dim; ++c) {
    for (int j = 0; j < old; ++j) {
      inputs[j * dim + c] = tile.continues ? load_as(p->conv_state, state + c * old + j, p->dtype) : 0.0f;
    }
  }
  for (int t = 0; t < tile.tokens; ++t) {
    widen_row(p->qkv, (tile.row + t) * p->qkv_stride + first, inputs + (old + t) * dim, dim, p->dtype);
  }
  for (int t = 0; t < tile.tokens; ++t) {
    float* sums = mixed + t * dim;
    for (int c = 0; c < dim; ++c) sums[c] = 0;
    for (int j = 0; j < taps; ++j) {
      const float* weight = weights + j * dim;
      const float* input = inputs + (t + j) * dim;
      for (int c = 0; c < dim; ++c) sums[c] += weight[c] * input[c];
    }
    for (int c = 0; c < dim; ++c) sums[c] = silu(sums[c]);
    round_row(sums, dim, p->dtype);
  }
  for (int c = 0; c < dim; ++c) {
    for (int j = 0; j < old; ++j) {
      store_as(p->conv_state, state + c * old + j, inputs[(tile.tokens + j) * dim + c], p->dtype);
    }
  }
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
  convolve(tile, first, dim, v, read);
  Pending pending{nullptr, delta, 0};
  for (int t = 0; t < tile.tokens; ++t, q += rows, k += rows, v += dim) {
    const int64_t token = tile.row + t;
    if (pending.k) {
      pass<true, true>(state, rows, dim, pending, k, q, read, o);
    } else {
      pass<false, true>(state, rows, dim, pending, k, q, read, o);
    }
    const float rate = load_as(p->a, token * p->a_stride + head, p->dtype) + p->dt_bias[head];
    /* As torch's softplus. */
    const float soft = rate > 20.0f ? rate : __builtin_log1pf(__builtin_expf(rate));
    const float decay = __builtin_expf(-__builtin_expf(p->a_log[head]) * soft);
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
  convolve(tile, (int64_t)head * dim, dim, q, rest);
  convolve(tile, (int64_t)(p->key_heads + head) * dim, dim, k, rest);
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
