// A gated activation at the end of a product. The weight holds rows of gates, then as many of ups; a launch takes them in
// turns, so that whoever has the sums of a gate has those of its up, and writes activation(gate) * up.
#pragma once

#include "common.cuh"

namespace nf4 {

struct Gate {
  int columns;      // of the output: rows of gates; 0 where a product's sums are its output
  bool cubic;       // GELU, approximated by tanh; else SiLU
  int tile_shift;   // the output comes in tiles (reference.py's arrange()) of 2^tile_shift rows; 0: in rows
  int tile_blocks;  // 64-wide blocks of a tile's rows

  // Where an element of the output lies.
  __device__ __forceinline__ int place(int token, int column) const {
    if (tile_shift == 0) return token * columns + column;
    int word = column % 64 / 2, row = token & ((1 << tile_shift) - 1);
    int tile = (token >> tile_shift) * tile_blocks + column / 64;
    return ((tile << tile_shift) + row) * 64 + (word % 8 ^ row % 8) * 8 + word / 8 * 2 + column % 2;
  }
  // How much further on than at one of a launch's tile's first 8 tokens the same column lies at a later token of that tile, a
  // multiple of 8 later. Both tiles' rows are powers of two, so the output's changes where `later` says so.
  __device__ __forceinline__ int offset_of_later(int later) const {
    int step = tile_shift ? 64 : columns, next_tile = tile_shift ? (tile_blocks - 1) << (tile_shift + 6) : 0;
    return later * step + (later >> tile_shift) * next_tile;
  }

  __device__ __forceinline__ float activated(float x) const {
    // Both are x / (1 + exp(-by x)): GELU's 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)). What is subnormal is no matter here.
    float by = -1.4426950408889634f, exponential, share;
    if (cubic) by = fmaf(-0.1029432395800235f * x, x, -2.302208198144325f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * by));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + exponential));
    return x * share;
  }
  // Of two gates and their ups, in bfloat16. The activation is rounded before the multiplication, as models do it.
  __device__ __forceinline__ unsigned apply(unsigned gates, unsigned ups) const {
    float2 both = unpack2<__nv_bfloat16>(gates);
    return multiply_pairs(pack2<__nv_bfloat16>(activated(both.x), activated(both.y)), ups);
  }
};

inline Gate gate_of(const Nf4Linear& linear) {
  if (linear.activation == NF4_NO_ACTIVATION) return Gate{};
  int columns = static_cast<int>(linear.weight.n / 2);
  int shift = linear.out_tile ? log2_of(linear.out_tile) : 0;
  return Gate{columns, linear.activation == NF4_GELU_TANH, shift, columns / 64};
}

// Whether a launch can do what is asked of its output.
inline bool gate_fits(const Nf4Linear& linear) {
  if (linear.activation == NF4_NO_ACTIVATION) return linear.out_tile == 0;
  bool known = linear.activation == NF4_SILU || linear.activation == NF4_GELU_TANH;
  int tile = linear.out_tile;
  bool tiled = tile == 0 || (tile >= 8 && (tile & (tile - 1)) == 0 && linear.weight.n % 512 == 0);
  bool indexed = (linear.m + tile) * (linear.weight.n / 2) < int64_t{1} << 31;
  return known && tiled && indexed && linear.dtype == NF4_BFLOAT16 && linear.weight.n % 16 == 0 && !linear.residual;
}

}  // namespace nf4
