// The producer warps of work.cuh.
#pragma once

#include "work.cuh"

namespace nf4 {

template <typename Traits>
__device__ __forceinline__ void load_expert_weights(const MoeWgmmaArgs& args, const CUtensorMap* map,
                                                    WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  MoeTiles work(args);
  Ring<Traits::kStages> ring;
  while (work.advance<Layout::kRows>(args)) {
    for (int step = 0; step < args.steps; ++step) {
      barrier_wait(layout.weights_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.weights_full(ring.stage);
      expect_bytes(full, Layout::kWeightBytes);
      if constexpr (Traits::kGates) {
        copy_box(layout.weights(ring.stage), map, step * 128, 0, work.row / 2, work.expert, full);
      } else {
        copy_box(layout.weights(ring.stage), map, step * 128, work.row, work.expert, full);
      }
      ring.advance();
    }
  }
}

__device__ __forceinline__ void copy_chunk(unsigned target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One warp gathers the activations of a group's choices: eight lanes copy 64 k of one, four choices at a time. wgmma reads
// them through another proxy, so each lane's copies are waited for and fenced before the stage is handed over; kAhead stages
// are on their way meanwhile. Where a group has fewer choices, the first row of x is copied, whose results are not
// written.
template <typename Traits>
__device__ __forceinline__ void gather_choices(const MoeWgmmaArgs& args, WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  constexpr int kTokens = Traits::kTokens, kBlocks = Layout::kTokenBlocks, kAhead = Traits::kTokenStages > 4 ? 3 : 2;
  constexpr int kHeld = (kTokens + 31) / 32;
  int lane = threadIdx.x % 32, chunk = lane % 8, first = lane / 8;
  unsigned even = first * 128 + ((chunk ^ first) << 4), odd = first * 128 + ((chunk ^ first ^ 4) << 4);
  MoeTiles work(args);
  Ring<Traits::kTokenStages> ring;
  int under_way = 0, full = 0;  // full: the stage that is handed over next
  auto hand_over = [&] {
    fence_loads_before_copies();
    __syncwarp();
    if (lane == 0) barrier_arrive(layout.tokens_full(full));
    full = full + 1 == Traits::kTokenStages ? 0 : full + 1;
    --under_way;
  };
  while (work.advance<Layout::kRows>(args)) {
    int held[kHeld];
    const int* choices = args.list.choices(work.group);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int place = i * 32 + lane;
      held[i] = max(load_fresh(choices + min(place, kTokens - 1)), 0) / args.x_choices;
    }
    for (int copy = 0; copy < args.steps * (4 / kBlocks); ++copy) {
      barrier_wait(layout.tokens_empty(ring.stage), ring.parity ^ 1);
      unsigned target = layout.tokens(ring.stage);
      const char* from = args.tiles + copy * (kBlocks * 128) + chunk * 16;
#pragma unroll
      for (int j = 0; j < kTokens / 4; ++j) {
        int row = __shfl_sync(~0u, held[j / 8], first + j % 8 * 4);
        const char* source = from + uint64_t{static_cast<unsigned>(row)} * args.row_bytes;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          copy_chunk(target + (block * kTokens + j * 4) * 128 + (j % 2 ? odd : even), source + block * 128);
        }
      }
      commit_copies();
      ++under_way;
      ring.advance();
      if (under_way == kAhead) {
        wait_copies<kAhead - 1>();
        hand_over();
      }
    }
  }
  wait_copies<0>();
  while (under_way > 0) hand_over();
}

// The same where the activations are tiles already, one behind the other for each group.
template <typename Traits>
__device__ __forceinline__ void load_choices(const MoeWgmmaArgs& args, WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  MoeTiles work(args);
  Ring<Traits::kTokenStages> ring;
  int copies = args.steps * (4 / Layout::kTokenBlocks);
  while (work.advance<Layout::kRows>(args)) {
    const char* from = args.tiles + int64_t{work.group} * copies * Layout::kTokenBytes;
    for (int copy = 0; copy < copies; ++copy, from += Layout::kTokenBytes) {
      barrier_wait(layout.tokens_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.tokens_full(ring.stage);
      expect_bytes(full, Layout::kTokenBytes);
      copy_bytes(layout.tokens(ring.stage), from, Layout::kTokenBytes, full);
      ring.advance();
    }
  }
}

// A row of a tile as one of all experts' rows; beyond the expert's last row it is that last row.
template <typename Traits>
__device__ __forceinline__ int flat_row(const MoeWgmmaArgs& args, const MoeTiles& work, int row) {
  return work.expert * args.n + args.weight_row<Traits::kGates>(min(work.row + row, args.n - 1));
}

// The four scales of one row and k step for any block size; beyond k they are zeros.
template <typename Traits>
__device__ __forceinline__ float4 any_scales(const MoeWgmmaArgs& args, const float* code, int flat, int step) {
  const Nf4Weight& w = args.weight;
  int64_t first = int64_t{flat} * args.k_blocks + step * 4;
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int64_t at = (first + i) >> args.scale_shift;
    scales[i] = 0.0f;
    if (step * 4 + i >= args.k_blocks) continue;
    int64_t group = at >> 8;
    scales[i] = Traits::kNested ? nested_scale(code[__ldg(w.absmax_8bit + at)], __ldg(w.absmax + group),
                                               __ldg(w.absmax_offset + group * w.offset_stride))
                                : __ldg(w.absmax + at);
  }
  return make_float4(scales[0], scales[1], scales[2], scales[3]);
}

// Two warps, of which this is one of the 64 threads, load scales as floats; they decode nested ones.
template <typename Traits>
__device__ __forceinline__ void load_expert_scales(const MoeWgmmaArgs& args, WgmmaLayout<Traits> layout, char* shared,
                                                   int thread) {
  using Layout = WgmmaLayout<Traits>;
  constexpr int kPerThread = Layout::kRows / 64;
  constexpr int kSteps = Traits::kManySums ? 1 : Traits::kNested ? 4 : 2;
  float* code = reinterpret_cast<float*>(shared + Layout::kCode);
  if (Traits::kNested) {
    for (int i = thread; i < 256; i += 64) code[i] = __ldg(args.weight.absmax_code + i);
    barrier_sync(kScaleBarrier, 64);
  }
  MoeTiles work(args);
  Ring<Traits::kStages> ring;
  auto store = [&](int i, float4 scales) {
    float* target = reinterpret_cast<float*>(shared + Layout::kScales + ring.stage * Layout::kScaleBytes) + thread;
    target[i * 64] = scales.x;
    target[i * 64 + Layout::kRows] = scales.y;
    target[i * 64 + 2 * Layout::kRows] = scales.z;
    target[i * 64 + 3 * Layout::kRows] = scales.w;
  };
  auto wait_stage = [&] { barrier_wait(layout.weights_empty(ring.stage), ring.parity ^ 1); };
  auto commit_stage = [&] {
    barrier_arrive(layout.scales_full(ring.stage));
    ring.advance();
  };
  while (work.advance<Layout::kRows>(args)) {
    if (!args.own_scales) {
      for (int step = 0; step < args.steps; ++step) {
        wait_stage();
        for (int i = 0; i < kPerThread; ++i) {
          store(i, any_scales<Traits>(args, code, flat_row<Traits>(args, work, thread + i * 64), step));
        }
        commit_stage();
      }
      continue;
    }
    for (int batch = 0; batch < args.steps; batch += kSteps) {
      RawScales<Traits::kNested, kSteps> raw[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        raw[i].load(args, flat_row<Traits>(args, work, thread + i * 64), batch, args.steps - 1);
      }
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (batch + j >= args.steps) break;
        wait_stage();
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) store(i, raw[i].decoded(args, j, args.k_blocks - (batch + j) * 4, code));
        commit_stage();
      }
    }
  }
}

}  // namespace nf4
