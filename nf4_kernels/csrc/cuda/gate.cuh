// The epilogue's gated activation. The weight holds rows of gates, then as many of ups; a launch's tiles hold them
// alternately, so that the thread that has the sums of a gate has those of its up, and writes activation(gate) * up.
#pragma once

#include <limits.h>

#include "common.cuh"

namespace nf4 {

struct Gate {
  int columns;      // columns of the output, one for each row of gates; 0 where there is no activation
  bool cubic;       // GELU, approximated by tanh; else SiLU
  int tile;         // the tokens of a tile where the output is tiled activations; 0 where it is row-major
  int tile_blocks;  // 64-wide blocks of a tile's tokens

  // The index of an element of the output.
  __device__ __forceinline__ int place(int token, int column) const {
    if (tile == 0) return token * columns + column;
    int word = column % 64 / 2, row = token % tile;
    int block = token / tile * tile_blocks + column / 64;
    return (block * tile + row) * 64 + (word % 8 ^ row % 8) * 8 + word / 8 * 2 + column % 2;
  }

  // Walks down a column of the output, 8 tokens at a time. Tiles have a multiple of 8 tokens, so a token's place in the
  // eight stays the same, and with it its swizzle.
  struct Walk {
    int place, step, left, tile, next_tile;  // left: tokens from here to the end of the output's tile
    __device__ __forceinline__ void advance() {
      place += step;
      left -= 8;
      if (left <= 0) {
        left += tile;
        place += next_tile;
      }
    }
  };
  __device__ __forceinline__ Walk walk(int token, int column) const {
    if (tile == 0) return {place(token, column), 8 * columns, INT_MAX, 0, 0};
    return {place(token, column), 8 * 64, tile - token % tile, tile, (tile_blocks - 1) * tile * 64};
  }

  __device__ __forceinline__ float activated(float x) const {
    // Both are x / (1 + exp(-by x)): GELU's 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)). Subnormal numbers do not matter here.
    float by = -1.4426950408889634f, exponential, share;
    if (cubic) by = fmaf(-0.1029432395800235f * x, x, -2.302208198144325f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * by));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + exponential));
    return x * share;
  }
  // activation(gate) * up for two gates and their ups, in bfloat16. Models round the activation before they multiply.
  __device__ __forceinline__ unsigned apply(unsigned gates, unsigned ups) const {
    float2 both = unpack2<__nv_bfloat16>(gates);
    return multiply_pairs(pack2<__nv_bfloat16>(activated(both.x), activated(both.y)), ups);
  }
};

inline Gate gate_of(const Nf4Linear& linear) {
  if (linear.activation == NF4_NO_ACTIVATION) return Gate{};
  int columns = static_cast<int>(linear.weight.n / 2);
  return Gate{columns, linear.activation == NF4_GELU_TANH, linear.out_tile, columns / 64};
}

// Whether the epilogue can write the output that is asked for.
inline bool gate_fits(const Nf4Linear& linear) {
  if (linear.activation == NF4_NO_ACTIVATION) return linear.out_tile == 0;
  bool known = linear.activation == NF4_SILU || linear.activation == NF4_GELU_TANH;
  int tile = linear.out_tile;
  bool tiled = tile == 0 || (tile >= 8 && tile % 8 == 0 && linear.weight.n % 512 == 0);
  bool indexed = (linear.m + tile) * (linear.weight.n / 2) < int64_t{1} << 31;
  return known && tiled && indexed && linear.dtype == NF4_BFLOAT16 && linear.weight.n % 16 == 0 && !linear.residual;
}

}  // namespace nf4
