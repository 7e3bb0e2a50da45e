// The consumer warpgroups of work.cuh, their epilogue, and the kernel.
#pragma once

#include "producers.cuh"

namespace nf4 {

// As many of a thread's choices as are loaded together. No load is moved across a store, which it might alias; one by one, each
// would be waited for.
template <typename Traits>
constexpr int kChoicesAtOnce = Traits::kTokens / 8 < 8 ? Traits::kTokens / 8 : 8;

// Adds the bias, rounds once and writes a warpgroup's 64 rows x kTokens choices; row and column t are the thread's first ones.
template <typename Traits>
__device__ __forceinline__ void write_choices(const MoeWgmmaArgs& args, const MoeTiles& work, int row, int t,
                                              const float (&sum)[Traits::kSums]) {
  using T = typename Traits::T;
  constexpr float kScale = kSumScale<Traits>;
  if (row >= args.n) return;
  const T* bias = static_cast<const T*>(args.bias) + int64_t{work.expert} * args.n + row;
  bool both = row + 1 < args.n, paired = both && args.n % 2 == 0;
  float add0 = args.bias ? to_float(bias[0]) : 0.0f, add1 = args.bias && both ? to_float(bias[1]) : 0.0f;
  const int2* choices = reinterpret_cast<const int2*>(args.list.choices(work.group) + t);
  T* out = static_cast<T*>(args.out) + row;
  constexpr int kAtOnce = kChoicesAtOnce<Traits>;
#pragma unroll
  for (int first = 0; first < Traits::kTokens / 8; first += kAtOnce) {
    int2 held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) held[i] = load_fresh(choices + (first + i) * 4);
#pragma unroll
    for (int i = 0; i < kAtOnce * 2; ++i) {
      int choice = i % 2 ? held[i / 2].y : held[i / 2].x, at = (first + i / 2) * 4 + i % 2;
      if (choice < 0) continue;
      T* to = out + int64_t{choice} * args.n;
      float low = fmaf(sum[at], kScale, add0), high = fmaf(sum[at + 2], kScale, add1);
      if (paired) {
        *reinterpret_cast<unsigned*>(to) = pack2<T>(low, high);
      } else {
        to[0] = from_float<T>(low);
        if (both) to[1] = from_float<T>(high);
      }
    }
  }
}

// The same where rows are alternately gates and ups. The columns of two neighbouring lanes make a word: the even lane writes
// that of the first choice of two, the odd one that of the second.
template <typename Traits>
__device__ __forceinline__ void write_gated_choices(const MoeWgmmaArgs& args, const MoeTiles& work, int row, int t,
                                                    const float (&sum)[Traits::kSums]) {
  using T = typename Traits::T;
  constexpr float kScale = kSumScale<Traits>;
  bool there = row < args.n;
  int column = row / 2;
  const T* bias = static_cast<const T*>(args.bias) + int64_t{work.expert} * args.n;
  float add0 = args.bias && there ? to_float(bias[column]) : 0.0f;
  float add1 = args.bias && there ? to_float(bias[column + args.gate.columns]) : 0.0f;
  bool odd = column % 2;
  const int* choices = args.list.choices(work.group) + t + odd;
  T* out = static_cast<T*>(args.out) + column - odd;
  constexpr int kAtOnce = kChoicesAtOnce<Traits>;
#pragma unroll
  for (int first = 0; first < Traits::kTokens / 8; first += kAtOnce) {
    int held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) held[i] = load_fresh(choices + (first + i) * 8);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int at = (first + i) * 4;
      auto one = [&](int j) {
        return gated_activation(args.activation, fmaf(sum[at + j], kScale, add0), fmaf(sum[at + j + 2], kScale, add1));
      };
      unsigned both = pack2<T>(one(0), one(1));
      unsigned others = __shfl_xor_sync(~0u, both, 4);
      unsigned word = __byte_perm(both, others, odd ? 0x3276 : 0x5410);
      if (there && held[i] >= 0) *reinterpret_cast<unsigned*>(out + int64_t{held[i]} * args.gate.columns) = word;
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void consume_choices(const MoeWgmmaArgs& args, const char* shared) {
  ConsumerThread<Traits> thread(shared);
  ConsumerRings<Traits> rings;
  Operands<Traits> operands;
  StageClock<false> decoding;
  MoeTiles work(args);
  if (Traits::kPingPong && thread.group == Traits::kGroups - 1) barrier_signal(kPingPongBarrier, 256);
  while (work.advance<Traits::kRows>(args)) {
    float total[Traits::kSums];
    multiply_tile<Traits>(thread, rings, operands, total, args.steps, decoding);
    if constexpr (Traits::kGates) {
      write_gated_choices<Traits>(args, work, work.row + thread.row, thread.t * 2, total);
    } else {
      write_choices<Traits>(args, work, work.row + thread.row, thread.t * 2, total);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    moe_wgmma(const __grid_constant__ MoeWgmmaArgs args, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  WgmmaLayout<Traits> layout{shared_address(shared)};
  if (layout.base != kTableBase) __trap();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, producer = warp - Traits::kConsumerWarps;
  if (producer == 0 && lane == 0) prefetch_map(&map);
  if (threadIdx.x == 0) layout.init_barriers();
  __syncthreads();
  if (producer >= 0) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    grid_dependency_wait();
    if (producer == 0) {
      if (lane == 0) load_expert_weights<Traits>(args, &map, layout);
    } else if (producer == 1) {
      if (!args.tiled) {
        gather_choices<Traits>(args, layout);
      } else if (lane == 0) {
        load_choices<Traits>(args, layout);
      }
    } else {
      load_expert_scales<Traits>(args, layout, shared, (producer - 2) * 32 + lane);
    }
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    fill_table<Traits>(shared, warp);
    barrier_sync(kTableBarrier, Traits::kConsumers);
    grid_dependency_wait();
    launch_dependents();  // not before the experts are there, see Nf4Moe
    consume_choices<Traits>(args, shared);
  }
#endif
}

}  // namespace nf4
