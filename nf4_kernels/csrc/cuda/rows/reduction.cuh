// The warp of linear_rows.cuh that reduces: it adds the sums of the warps, of the passes and of the blocks of a cluster, and
// is the epilogue (bias, residual, norm, gated activation, rounding).
#pragma once

#include "weights_and_scales.cuh"

namespace nf4 {

__device__ __forceinline__ void add(float4& sum, float4 value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// What is added to the 16 rows x 8 tokens that a warp's accumulators hold: bias and residual, for rows before `last`. Returned
// by value it would take 30 instructions more.
template <typename T, bool kGates>
__device__ __forceinline__ void load_addend(const RowsArgs& args, int first, int last, float4& sum) {
  int lane = threadIdx.x % 32, row = first + lane / 4, token = lane % 4 * 2;
  const T* bias = static_cast<const T*>(args.bias);
  const T* residual = static_cast<const T*>(args.residual);
  float addend[2][2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int r = row + half * 8;
    if (r >= last) continue;
    if (kGates) r = args.weight_row<true>(first, lane / 4 + half * 8);
    if (bias) addend[half][0] = addend[half][1] = to_float(bias[r]);
#pragma unroll
    for (int i = 0; residual && i < 2; ++i) {
      if (token + i < args.m) addend[half][i] += to_float(load_fresh(residual + int64_t{token + i} * args.n + r));
    }
  }
  sum = make_float4(addend[0][0], addend[0][1], addend[1][0], addend[1][1]);
}

// Writes activation(gate) * up, from the sums of gates and of their ups. The columns of two neighbouring lanes make a word:
// the even lane writes that of the first token of two, the odd one that of the second.
__device__ __forceinline__ void write_gated(const RowsArgs& args, int first, float4 sum, float2 scale, float4 addend) {
  using T = __nv_bfloat16;
  int lane = threadIdx.x % 32, column = first / 2 + lane / 4, odd = column % 2;
  int token = lane % 4 * 2 + odd;
  unsigned gates = pack2<T>(fmaf(sum.x, scale.x, addend.x), fmaf(sum.y, scale.y, addend.y));
  unsigned ups = pack2<T>(fmaf(sum.z, scale.x, addend.z), fmaf(sum.w, scale.y, addend.w));
  unsigned both = args.gate.apply(gates, ups);
  unsigned others = __shfl_xor_sync(~0u, both, 4);
  unsigned word = __byte_perm(both, others, odd ? 0x3276 : 0x5410);
  if (token >= args.m) return;
  T* out = static_cast<T*>(args.out);
  *reinterpret_cast<unsigned*>(out + args.gate.place(token, column - odd)) = word;
}

// Multiplies the sums by their scale, adds the addend, rounds once and writes.
template <typename T, bool kGates>
__device__ __forceinline__ void write_outputs(const RowsArgs& args, int first, int last, float4 sum, float2 scale,
                                              float4 addend) {
  if constexpr (kGates) {
    write_gated(args, first, sum, scale, addend);
    return;
  }
  int lane = threadIdx.x % 32, row = first + lane / 4, token = lane % 4 * 2;
  T* out = static_cast<T*>(args.out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int r = row + half * 8;
    if (r >= last) continue;
    int64_t at = int64_t{token} * args.n + r;
    float even = fmaf(half ? sum.z : sum.x, scale.x, half ? addend.z : addend.x);
    float odd = fmaf(half ? sum.w : sum.y, scale.y, half ? addend.w : addend.y);
    if (token < args.m) out[at] = from_float<T>(even);
    if (token + 1 < args.m) out[at + args.n] = from_float<T>(odd);
  }
}

// Divides the scales of a lane's two tokens by their root mean square. The consumers' sums of squares are there once their
// first sums are.
template <typename Layout>
__device__ __forceinline__ void normalise(const RowsArgs& args, const char* shared, float2& scale) {
  const float2* squares = reinterpret_cast<const float2*>(shared + Layout::kSquares) + threadIdx.x % 4;
  float2 sum = make_float2(0.0f, 0.0f);
  for (int warp = 0; warp < Layout::kWarps; ++warp) {
    float2 more = squares[warp * 4];
    sum.x += more.x;
    sum.y += more.y;
  }
  scale.x *= rsqrtf(sum.x / args.k + args.norm_eps);
  scale.y *= rsqrtf(sum.y / args.k + args.norm_eps);
}

// The reducing warp's place in its rings and, in the first block of a cluster, the sums of the row group before. These wait
// for the other blocks' partial sums, which are on their way while this block adds up the next row group.
struct Reduction {
  RingPosition sums, partials;
  float4 sum, waiting, addend;
  int waiting_row = -1;
};

// Adds the warps' sums of a stage.
template <typename Layout>
__device__ __forceinline__ void sum_warps(char* shared, Reduction& at) {
  unsigned base = shared_address(shared);
  barrier_wait(Layout::sums_full(base, at.sums.stage), at.sums.parity);
  const float4* from = reinterpret_cast<const float4*>(shared + Layout::kSums) +
                       at.sums.stage * Layout::kWarps * 32 + threadIdx.x % 32;
  at.sum = *from;
#pragma unroll
  for (int warp = 1; warp < Layout::kWarps; ++warp) add(at.sum, from[warp * 32]);
  barrier_arrive(Layout::sums_empty(base, at.sums.stage));
  at.sums.advance(2);
}

// Adds the sums of the passes before and keeps them for the next pass; returns whether there is one.
template <typename Layout>
__device__ __forceinline__ bool keep_for_next_pass(const RowsArgs& args, char* shared, const RowsRun& run, Reduction& at) {
  if (args.passes == 1) return false;
  float4* held = reinterpret_cast<float4*>(shared + Layout::held(args.stages, args.cluster)) +
                 (run.row - run.chunk_first) / kGroupRows * 32 + threadIdx.x % 32;
  if (run.pass > 0) add(at.sum, *held);
  if (!run.last_pass()) *held = at.sum;
  return !run.last_pass();
}

// Sends a row group's sums to the first block of the cluster.
template <typename Layout>
__device__ __forceinline__ void send_partial_sums(const RowsArgs& args, unsigned base, int rank, Reduction& at) {
  barrier_wait(Layout::partials_free(base, at.partials.stage), at.partials.parity ^ 1);
  unsigned target = remote_address(base + Layout::partial_slot(args, at.partials.stage, rank) + threadIdx.x % 32 * 16, 0);
  unsigned barrier = remote_address(Layout::partials_full(base, at.partials.stage), 0);
  store_remote(target, at.sum, barrier);
  at.partials.advance(2);
}

// Adds the other blocks' partial sums of the waiting row group, in the order of k.
template <typename Layout>
__device__ __forceinline__ void reduce_partial_sums(const RowsArgs& args, char* shared, const RowsRun& run, Reduction& at) {
  int lane = threadIdx.x % 32, stage = at.partials.stage;
  unsigned base = shared_address(shared);
  if (lane == 0) barrier_expect(Layout::partials_full(base, stage), (args.cluster - 1) * 512);
  barrier_wait(Layout::partials_full(base, stage), at.partials.parity);
  for (int other = 1; other < args.cluster; ++other) {
    add(at.waiting, reinterpret_cast<const float4*>(shared + Layout::partial_slot(args, stage, other))[lane]);
  }
  __syncwarp();
  // A block that has nothing left to send may have ended: nobody arrives at its barrier then.
  bool more = at.waiting_row + 2 * kGroupRows < run.last;
  if (more && lane > 0 && lane < args.cluster) {
    barrier_arrive_remote(remote_address(Layout::partials_free(base, stage), lane));
  }
  at.partials.advance(2);
}

template <typename T, typename Layout, bool kNormalises, bool kGates>
__device__ __forceinline__ void reduce(const RowsArgs& args, char* shared, RowsRun run) {
  unsigned base = shared_address(shared);
  int rank = blockIdx.x % args.cluster;
  grid_dependency_wait();
  if (args.cluster > 1) cluster_wait();
  Reduction at;
  float2 scale = make_float2(kShrink<T>, kShrink<T>);
  bool normalised = false;
  for (;; run.next()) {
    bool more = !run.done();
    // These loads are issued before the row group's sums are waited for.
    float4 addend = {};
    if (more && rank == 0 && (args.bias || args.residual) && run.last_pass()) {
      load_addend<T, kGates>(args, run.row, run.last, addend);
    }
    if (more) {
      sum_warps<Layout>(shared, at);
      if (kNormalises && !normalised) normalise<Layout>(args, shared, scale);
      normalised = true;
      if (keep_for_next_pass<Layout>(args, shared, run, at)) continue;
      if (rank > 0) {
        send_partial_sums<Layout>(args, base, rank, at);
        continue;
      }
    }
    if (args.cluster == 1) {
      if (!more) break;
      write_outputs<T, kGates>(args, run.row, run.last, at.sum, scale, addend);
      continue;
    }
    if (at.waiting_row >= 0) {
      reduce_partial_sums<Layout>(args, shared, run, at);
      write_outputs<T, kGates>(args, at.waiting_row, run.last, at.waiting, scale, at.addend);
    }
    if (!more) break;
    at.waiting = at.sum;
    at.addend = addend;
    at.waiting_row = run.row;
  }
  if (threadIdx.x % 32 == 0) clock_end(args.clock);
}

}  // namespace nf4
