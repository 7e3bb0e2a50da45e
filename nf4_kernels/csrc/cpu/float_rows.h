/* GEMMs with float32 panels and with bfloat16 weights, lanes along the columns; static for the reason given in kernels.h.
 *
 * `Lanes` is what an instruction set has for them: Vector, a vector of kWidth floats; load(), multiply_add() and zero();
 * sums<R>(totals, to), the sums of R vectors' lanes; kTokens and rows(tokens), the most tokens and the rows of a panel at a
 * time. For bfloat16 weights widen(from, even, odd), floats of 2 kWidth of them; kWideTokens and wide_rows(tokens). */
#pragma once

#include "kernels.h"

namespace nf4 {
namespace {

/* M tokens times R rows of the panel. A product has one vector of partial sums, whatever stands beside it, so that its bits
 * are the same in every batch; the others' sums fill the time until its next addition can begin. */
template <class Lanes, int M, int R>
void panel_times(const float* panel, const float* x, int64_t stride, float* sums) {
  typename Lanes::Vector total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = Lanes::zero();
  }
  for (int64_t k = 0; k < stride; k += Lanes::kWidth) {
    typename Lanes::Vector value[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) value[m] = Lanes::load(x + m * stride + k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename Lanes::Vector weight = Lanes::load(panel + r * stride + k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) total[m][r] = Lanes::multiply_add(value[m], weight, total[m][r]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) Lanes::template sums<R>(total[m], sums + m * kUnit);
}

/* Kernels::dot of up to Lanes::kTokens tokens. Sums of what lies behind `rows` in the panel are no results. */
template <class Lanes, int M = 1>
void dot_tokens(const float* panel, int rows, const float* x, int64_t stride, int count, float* sums) {
  if constexpr (M < Lanes::kTokens) {
    if (count > M) return dot_tokens<Lanes, M + 1>(panel, rows, x, stride, count, sums);
  }
  constexpr int R = Lanes::rows(M);
  for (int j = 0; j < rows; j += R) panel_times<Lanes, M, R>(panel + j * stride, x, stride, sums + j);
}

template <class Lanes>
void dot(const float* panel, int rows, const Prepared* x, int64_t m0, int count, float* sums) {
  for (int i = 0; i < count; i += Lanes::kTokens) {
    dot_tokens<Lanes>(panel, rows, x->x + (m0 + i) * x->stride, x->stride, count - i, sums + i * kUnit);
  }
}

/* M tokens times R rows of bfloat16 weights. The next R rows follow in memory, but hardware sees R short streams: they are
 * fetched in order from here. */
template <class Lanes, int M, int R>
void bf16_times(const uint16_t* const rows[R], const float* x, int64_t k, float* sums) {
  constexpr int kWidth = Lanes::kWidth;
  typename Lanes::Vector total[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) total[m][r] = Lanes::zero();
  }
  const char* next = (const char*)(rows[0] + R * k);
  for (int64_t c = 0; c < k; c += 2 * kWidth) {
    typename Lanes::Vector even[R], odd[R];
#pragma GCC unroll 8
    for (int i = 0; i < R * kWidth / 16; ++i) __builtin_prefetch(next + c * R * 2 + i * 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Lanes::widen(rows[r] + c, &even[r], &odd[r]);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto x_even = Lanes::load(x + m * k + c), x_odd = Lanes::load(x + m * k + c + kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[m][r] = Lanes::multiply_add(even[r], x_even, total[m][r]);
        total[m][r] = Lanes::multiply_add(odd[r], x_odd, total[m][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) Lanes::template sums<R>(total[m], sums + m * kUnit);
}

template <class Lanes, int M = 1>
void bf16_tokens(const uint16_t* w, const float* x, int64_t k, int count, int64_t row0, int rows, float* sums) {
  if constexpr (M < Lanes::kWideTokens) {
    if (count > M) return bf16_tokens<Lanes, M + 1>(w, x, k, count, row0, rows, sums);
  }
  constexpr int R = Lanes::wide_rows(M);
  for (int first = 0; first < rows; first += R) {
    const uint16_t* from[R];
    /* Behind the last row, it is read again; its sum lands behind the sums that emit stores. */
    for (int r = 0; r < R; ++r) from[r] = w + (row0 + (first + r < rows ? first + r : rows - 1)) * k;
    bf16_times<Lanes, M, R>(from, x, k, sums + first);
  }
}

template <class Lanes>
void bf16_rows(const uint16_t* w, const Prepared* x, int64_t m0, int count, int64_t row0, int rows, float* sums) {
  for (int i = 0; i < count; i += Lanes::kWideTokens) {
    const float* from = (const float*)x->order + (m0 + i) * x->k;
    bf16_tokens<Lanes>(w, from, x->k, count - i, row0, rows, sums + i * kUnit);
  }
}

/* x as widen() gives weights: even columns, then odd ones. */
template <class Lanes>
void bf16_order(const Prepared* x, float* order) {
  constexpr int kWidth = Lanes::kWidth;
  for (int64_t i = 0; i < x->m; ++i) {
    const float* from = x->x + i * x->stride;
    for (int64_t c = 0; c < x->k; c += 2 * kWidth, order += 2 * kWidth) {
      for (int l = 0; l < kWidth; ++l) {
        order[l] = from[c + 2 * l];
        order[kWidth + l] = from[c + 2 * l + 1];
      }
    }
  }
}

}  // namespace
}  // namespace nf4
