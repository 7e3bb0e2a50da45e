// The end of a tile in linear_mma.cuh: bias, residual, gated activation and rounding, and the reduction of split tiles.
#pragma once

#include "layout.cuh"

namespace nf4 {

// Writes the sums of a thread: those of rows g and g + 8 of an m16 tile, each for the tokens 2t and 2t + 1.
template <typename T, typename Shape>
struct Writer {
  int row_tile, token;  // the thread's first ones
  bool pairs;           // whether words of two rows are aligned

  __device__ __forceinline__ Writer(const MmaArgs& args, const MmaStep& at) {
    row_tile = at.row_tile * kMmaRowTiles + threadIdx.x / 32 * Shape::kRowTiles;
    token = at.token_tile * Shape::kTokens + threadIdx.x % 4 * 2;
    pairs = args.n % 2 == 0;
  }
  __device__ __forceinline__ float2 pair_at(const void* from, int64_t at) const {
    return unpack2<T>(*reinterpret_cast<const unsigned*>(static_cast<const T*>(from) + at));
  }
  // Of two rows and two tokens a thread keeps both rows of one token: lanes of an even row the first one, of an odd the second.
  __device__ __forceinline__ void write(const MmaArgs& args, int i, int j, const float4& sum) const {
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
  __device__ __forceinline__ static void write_single(const MmaArgs& args, int row, int of, const float4& sum) {
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
  __device__ __forceinline__ void write_gated(const MmaArgs& args, int i, int j, const float4& sum) const {
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

// Partial sums of a split tile are kept in units of a float4 of each thread.
template <typename Shape>
constexpr int kUnits = Shape::kRowTiles * Shape::kTiles;

// The place of a thread block's partial sums of a tile: each has two, for the tile that it begins with and another one.
template <typename Shape>
__device__ __forceinline__ float4* partial_sums(const MmaArgs& args, int block, int tile) {
  bool begins_with = args.first_step(block) / args.k_steps == tile;
  return args.partials + int64_t{block * 2 + !begins_with} * kUnits<Shape> * Shape::kThreads + threadIdx.x;
}

// A split tile's counter: one for each thread block that has left its sums, and so much for each that needs them no more. They
// are apart because one without a share of the reduction ends before others have left theirs.
constexpr int kReduced = 1 << 16;

// Leaves a split tile's partial sums in memory and says so.
template <typename Shape>
__device__ __forceinline__ void leave_sums(const MmaArgs& args, int tile,
                                           const float (&acc)[Shape::kRowTiles][Shape::kTiles][4]) {
  float4* to = partial_sums<Shape>(args, blockIdx.x, tile);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kTiles; ++j) {
      const float(&sum)[4] = acc[i][j];
      __stcg(to + (i * Shape::kTiles + j) * Shape::kThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(args.counters + tile, 1);
  }
}

// Adds the partial sums of a split tile, each of its thread blocks an equal share of them, in the order of k. All thread
// blocks run at the same time (a cooperative launch), and none waits before it has left its own sums.
template <typename T, typename Shape>
__device__ __noinline__ void reduce_tile(const MmaArgs& args, int tile) {
  int first = args.block_of(tile * args.k_steps), last = args.block_of((tile + 1) * args.k_steps - 1);
  int parts = last - first + 1, part = blockIdx.x - first;
  int* counter = args.counters + tile;
  int unit = part * kUnits<Shape> / parts, end = (part + 1) * kUnits<Shape> / parts;
  if (threadIdx.x == 0 && unit < end) {
    int there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    } while (there % kReduced < parts);
  }
  __syncthreads();
  constexpr int64_t kBlockSums = int64_t{2} * kUnits<Shape> * Shape::kThreads;
  const float4* of_first = partial_sums<Shape>(args, first, tile);
  // The other thread blocks begin with this tile.
  const float4* of_others = args.partials + first * kBlockSums + threadIdx.x;
  Writer<T, Shape> writer(args, MmaStep(args, tile * args.k_steps));
#pragma unroll 1
  for (; unit < end; ++unit) {
    float4 sum = __ldcg(of_first + unit * Shape::kThreads);
    const float4* from = of_others + unit * Shape::kThreads;
#pragma unroll 8
    for (int other = 1; other < parts; ++other) {
      float4 more = __ldcg(from + other * kBlockSums);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    writer.write(args, unit / Shape::kTiles, unit % Shape::kTiles, sum);
  }
  // The last of all leaves the counter zero.
  if (threadIdx.x == 0 && atomicAdd(counter, kReduced) == (parts - 1) * kReduced + parts) *counter = 0;
}

}  // namespace nf4
