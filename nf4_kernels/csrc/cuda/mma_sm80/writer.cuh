// The end of a tile in linear_mma.cuh and whole/: bias, residual, gated activation and rounding.
#pragma once

#include "../gate.cuh"

namespace nf4 {

// Writes the sums of a thread: those of rows g and g + 8 of an m16 tile, each for the tokens 2t and 2t + 1.
template <typename T, typename Args>
struct Writer {
  int row_tile, token;  // the thread's first ones
  bool pairs;           // whether words of two rows are aligned

  // Of a warp that has m16 tiles from row_tile on, and tokens from this one on.
  __device__ __forceinline__ Writer(const Args& args, int row_tile, int token)
      : row_tile(row_tile), token(token + threadIdx.x % 4 * 2), pairs(args.n % 2 == 0) {}
  __device__ __forceinline__ float2 pair_at(const void* from, int64_t at) const {
    return unpack2<T>(*reinterpret_cast<const unsigned*>(static_cast<const T*>(from) + at));
  }
  // Of two rows and two tokens a thread keeps both rows of one token: lanes of an even row the first one, of an odd the second.
  __device__ __forceinline__ void write(const Args& args, int i, int j, const float4& sum) const {
    if (args.gate.columns) return write_gated(args, i, j, sum);
    int odd = threadIdx.x / 4 % 2, row = (row_tile + i) * 16 + threadIdx.x % 32 / 4;
    if (!pairs) return write_single(args, row, token + j * 8, sum);
    int of = token + j * 8 + odd;
    row -= odd;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
      float first = half ? sum.z : sum.x, second = half ? sum.w : sum.y;
      float others = __shfl_xor_sync(~0u, odd ? first : second, 4);
      if (of >= args.m || row >= args.n) continue;
      float2 both = odd ? make_float2(others, second) : make_float2(first, others);
      float2 more = make_float2(0.0f, 0.0f);
      int64_t at = int64_t{of} * args.n + row;
      if (args.bias) more = pair_at(args.bias, row);
      if (args.residual) {
        float2 residual = pair_at(args.residual, at);
        more.x += residual.x;
        more.y += residual.y;
      }
      *reinterpret_cast<unsigned*>(static_cast<T*>(args.out) + at) =
          pack2<T>(fmaf(both.x, kShrink<T>, more.x), fmaf(both.y, kShrink<T>, more.y));
    }
  }
  // The last row may have no neighbour, and those of odd tokens are not aligned.
  __device__ __forceinline__ static void write_single(const Args& args, int row, int of, const float4& sum) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int r = row + e / 2 * 8, token = of + e % 2;
      if (r >= args.n || token >= args.m) continue;
      int64_t at = int64_t{token} * args.n + r;
      float more = 0.0f;
      if (args.bias) more = to_float(static_cast<const T*>(args.bias)[r]);
      if (args.residual) more += to_float(static_cast<const T*>(args.residual)[at]);
      float value = e == 0 ? sum.x : e == 1 ? sum.y : e == 2 ? sum.z : sum.w;
      static_cast<T*>(args.out)[at] = from_float<T>(fmaf(value, kShrink<T>, more));
    }
  }
  __device__ __forceinline__ void write_gated(const Args& args, int i, int j, const float4& sum) const {
    using B = __nv_bfloat16;
    int odd = threadIdx.x / 4 % 2, column = (row_tile + i) * 8 + threadIdx.x % 32 / 4, of = token + j * 8 + odd;
    float gate = 0.0f, up = 0.0f;
    if (args.bias && column < args.gate.columns) {
      gate = to_float(static_cast<const B*>(args.bias)[column]);
      up = to_float(static_cast<const B*>(args.bias)[column + args.gate.columns]);
    }
    constexpr float by = kShrink<T>;
    unsigned both = args.gate.apply(pack2<B>(fmaf(sum.x, by, gate), fmaf(sum.y, by, gate)),
                                    pack2<B>(fmaf(sum.z, by, up), fmaf(sum.w, by, up)));
    unsigned others = __shfl_xor_sync(~0u, both, 4);
    if (of >= args.m || column >= args.gate.columns) return;
    *reinterpret_cast<unsigned*>(static_cast<B*>(args.out) + args.gate.place(of, column - odd)) =
        __byte_perm(both, others, odd ? 0x3276 : 0x5410);
  }
};

}  // namespace nf4
