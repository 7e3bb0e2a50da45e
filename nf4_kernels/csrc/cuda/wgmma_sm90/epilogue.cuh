// The epilogue of linear_wgmma.cuh: bias, residual and gated activation, rounding, and the output's addresses.
#pragma once

#include "../common.cuh"
#include "traits.cuh"

namespace nf4 {

// Whether two rows' sums of a token lie in one aligned word of the output.
__device__ __forceinline__ bool is_paired(const WgmmaArgs& args, int row) { return row + 1 < args.n && args.n % 2 == 0; }

// A thread's pairs of the residual, [token pair][token] as in write_tile().
template <typename Traits>
struct Residual {
  static constexpr int kTokens = Traits::kTokens;
  // All pairs are loaded ahead where registers allow it; else as many at a time as the next sums that are written.
  static constexpr bool kAhead = kTokens <= 64;
  static constexpr int kAtOnce = kAhead ? kTokens / 4 : 8;
  unsigned pairs[kAtOnce];
  // Beyond the last token this loads the last one's, so that no load is predicated.
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int token, int from) {
    using T = typename Traits::T;
    const T* residual = static_cast<const T*>(args.residual) + row;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t place = int64_t{min(token + (from + i) / 2 * 8 + i % 2, args.m - 1)} * args.n;
      pairs[i] = load_fresh(reinterpret_cast<const unsigned*>(residual + place));
    }
  }
};

// What a sum is multiplied by: codes that are rounded before they are scaled were stretched.
template <typename Traits>
constexpr float kSumScale = Traits::kScaledWeights ? 1.0f : kShrink<typename Traits::T>;

// Adds the bias and, with kAdds, the residual, rounds once and writes a warpgroup's 64 rows x kTokens tokens.
template <typename Traits, bool kAdds>
__device__ __forceinline__ void write_tile(const WgmmaArgs& args, int row, int token, const float (&sum)[Traits::kSums],
                                           Residual<Traits>& rest) {
  using T = typename Traits::T;
  constexpr int kTokens = Traits::kTokens;
  constexpr float kScale = kSumScale<Traits>;
  if (row >= args.n) return;
  const T* bias = static_cast<const T*>(args.bias);
  bool both = row + 1 < args.n;
  float add0 = bias ? to_float(bias[row]) : 0.0f, add1 = bias && both ? to_float(bias[row + 1]) : 0.0f;
  int64_t first = int64_t{token} * args.n + row, next = args.n, next_pair = int64_t{args.n} * 8;
  T* at = static_cast<T*>(args.out) + first;
  if (is_paired(args, row)) {
    constexpr int kAtOnce = Residual<Traits>::kAtOnce;
#pragma unroll
    for (int i = 0; i < kTokens / 4; i += 2, at += next_pair) {
      if (kAdds && !Residual<Traits>::kAhead && i % kAtOnce == 0) rest.load(args, row, token, i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 more = kAdds ? unpack2<T>(rest.pairs[(i + j) % kAtOnce]) : make_float2(0.0f, 0.0f);
        float low = fmaf(sum[i * 2 + j], kScale, add0 + more.x), high = fmaf(sum[i * 2 + j + 2], kScale, add1 + more.y);
        if (token + i * 4 + j < args.m) *reinterpret_cast<unsigned*>(at + j * next) = pack2<T>(low, high);
      }
    }
    return;
  }
  const T* residual = static_cast<const T*>(args.residual) + (kAdds ? first : 0);
#pragma unroll
  for (int i = 0; i < kTokens / 2; i += 4, at += next_pair) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (token + i * 2 + j >= args.m) return;
      T* to = at + j * next;
      const T* from = residual + i / 4 * next_pair + j * next;
      float2 more = make_float2(0.0f, 0.0f);
      if (kAdds) more.x = to_float(load_fresh(from));
      if (kAdds && both) more.y = to_float(load_fresh(from + 1));
      to[0] = from_float<T>(fmaf(sum[i + j], kScale, add0 + more.x));
      if (both) to[1] = from_float<T>(fmaf(sum[i + j + 2], kScale, add1 + more.y));
    }
  }
}

// The same where rows are alternately gates and ups, whose activation(gate) * up is written. The columns of two neighbouring
// lanes make a word: the even lane writes that of the first token of two, the odd one that of the second. All of a warp's
// rows are there, or none is.
template <typename Traits>
__device__ __forceinline__ void write_gated(const WgmmaArgs& args, int row, int token,
                                            const float (&sum)[Traits::kSums]) {
  using T = typename Traits::T;
  constexpr float kScale = kSumScale<Traits>;
  const T* bias = static_cast<const T*>(row < args.n ? args.bias : nullptr);
  int column = row / 2, limit = row < args.n ? args.m : 0;
  float add0 = bias ? to_float(bias[column]) : 0.0f, add1 = bias ? to_float(bias[column + args.gate.columns]) : 0.0f;
  bool odd = column % 2;
  token += odd;
  T* out = static_cast<T*>(args.out);
  Gate::Walk walk = args.gate.walk(token, column - odd);
#pragma unroll
  for (int i = 0; i < Traits::kTokens / 2; i += 4, walk.advance()) {
    auto two = [&](int from, float add) {
      return pack2<T>(fmaf(sum[from], kScale, add), fmaf(sum[from + 1], kScale, add));
    };
    unsigned both = args.gate.apply(two(i, add0), two(i + 2, add1));
    unsigned others = __shfl_xor_sync(~0u, both, 4);
    unsigned word = __byte_perm(both, others, odd ? 0x3276 : 0x5410);
    if (token + i * 2 < limit) *reinterpret_cast<unsigned*>(out + walk.place) = word;
  }
}

}  // namespace nf4
