// The producer warps of linear_wgmma.cuh: they load weights, tokens and scales into the rings, and partial sums behind them.
#pragma once

#include "../clock.cuh"
#include "split_tiles.cuh"

namespace nf4 {

template <typename Traits>
__device__ __forceinline__ void load_weights(const WgmmaArgs& args, const CUtensorMap* map,
                                             WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  TileScheduler work(args);
  Ring<Traits::kStages> ring;
  while (work.advance(args)) {
    int row = work.tile / args.token_tiles * Layout::kRows;
    for (int step = work.first_step; step < work.first_step + work.steps; ++step) {
      barrier_wait(layout.weights_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.weights_full(ring.stage);
      expect_bytes(full, Layout::kWeightBytes);
      if constexpr (Traits::kGates) {
        copy_box(layout.weights(ring.stage), map, step * 128, 0, row / 2, full);
      } else {
        copy_box(layout.weights(ring.stage), map, step * 128, row, full);
      }
      ring.advance();
    }
  }
  if (!PartialSumRing<Traits>::kOfTokens && work.first_step == 0 && work.steps < args.steps) {
    load_partial_sums<Traits>(args, work.tile, layout, ring);
  }
}

template <typename Traits>
__device__ __forceinline__ void load_tokens(const WgmmaArgs& args, WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  TileScheduler work(args);
  Ring<Traits::kTokenStages> ring;
  grid_dependency_wait();
  if (args.begins && blockIdx.x + blockIdx.y == 0) clock_start(args.clock);
  constexpr int kCopies = 4 / Layout::kTokenBlocks;
  while (work.advance(args)) {
    int64_t first = int64_t{work.tile % args.token_tiles} * args.steps + work.first_step;
    const char* from = args.tiles + first * kCopies * Layout::kTokenBytes;
    for (int copy = 0; copy < work.steps * kCopies; ++copy, from += Layout::kTokenBytes) {
      barrier_wait(layout.tokens_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.tokens_full(ring.stage);
      expect_bytes(full, Layout::kTokenBytes);
      copy_bytes(layout.tokens(ring.stage), from, Layout::kTokenBytes, full);
      ring.advance();
    }
  }
  if (PartialSumRing<Traits>::kOfTokens && work.first_step == 0 && work.steps < args.steps) {
    load_partial_sums<Traits>(args, work.tile, layout, ring);
  }
}

// The scales of one row and kSteps k steps as they lie in memory, where every 64 k have one of their own. Wide ones are read
// 16 bytes at once, since a launch's first reads wait behind its weights. Where k is no multiple of a k step, rows start
// anywhere: float scales are read one by one, nested ones as the aligned words around them. A word is read only if it
// holds scales of the row up to the last step. Scales beyond the row's end, which its last k step may reach, are zeros.
template <bool kNested, int kSteps>
struct RawScales {
  float4 scales[kSteps];
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int step, int last) {
    const float* from = args.weight.absmax + int64_t{row} * args.k_blocks;
    if (args.wide_scales) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) scales[i] = __ldg(reinterpret_cast<const float4*>(from) + min(step + i, last));
      return;
    }
    auto scale = [&](int block) { return __ldg(from + min(block, args.k_blocks - 1)); };
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int block = min(step + i, last) * 4;
      scales[i] = make_float4(scale(block), scale(block + 1), scale(block + 2), scale(block + 3));
    }
  }
  // count: how many of the k step's scales the row has.
  __device__ __forceinline__ float4 decoded(const WgmmaArgs&, int i, int count, const float*) const {
    float4 of = scales[i];
    return make_float4(of.x, count > 1 ? of.y : 0.0f, count > 2 ? of.z : 0.0f, count > 3 ? of.w : 0.0f);
  }
};
template <int kSteps>
struct RawScales<true, kSteps> {
  unsigned raw[kSteps + 1];
  int shift;       // the bits of the first word in front of the first scale
  unsigned place;  // the first scale's among the scales of the whole weight's groups
  // Second-level scales of the first scale's group of 256 and of the last one's. Those of one k step, where registers are
  // short, load the last one's when they need it.
  static constexpr int kGroups = kSteps > 1 ? 2 : 1;
  float absmax[kGroups], offset[kGroups];
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int step, int last) {
    const Nf4Weight& w = args.weight;
    unsigned first = static_cast<unsigned>(row) * args.k_blocks + step * 4;
    place = static_cast<unsigned>(row) * args.place_pitch + step * 4 + args.place_first;
    int count = min((min(kSteps - 1, last - step) + 1) * 4, args.k_blocks - step * 4);
    const uint8_t* from = w.absmax_8bit + first;
    shift = 0;
    if (kSteps == 4 && args.wide_scales) {
      uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
      raw[0] = words.x, raw[1 % kSteps] = words.y, raw[2 % kSteps] = words.z, raw[3 % kSteps] = words.w;
      raw[kSteps] = 0;
    } else {
      int before = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4), words = (before + count + 3) / 4;
      const unsigned* aligned = reinterpret_cast<const unsigned*>(from - before);
      shift = before * 8;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) raw[i] = __ldg(aligned + min(i, words - 1));
      raw[kSteps] = kSteps < words ? __ldg(aligned + kSteps) : 0;
      // Where registers are short (one k step), the scales are shifted into place at once.
      if (kSteps == 1) raw[0] = __funnelshift_r(raw[0], raw[1], shift);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      unsigned group = (place + i * (count - 1)) >> 8;
      absmax[i] = __ldg(w.absmax + group);
      offset[i] = __ldg(w.absmax_offset + group * w.offset_stride);
    }
  }
  __device__ __forceinline__ float4 decoded(const WgmmaArgs& args, int i, int count, const float* code) const {
    int second = static_cast<int>(256 - place % 256);  // the scale from which the last group's count
    float last_absmax = absmax[kGroups - 1], last_offset = offset[kGroups - 1];
    if (kSteps == 1 && second < count) {
      unsigned group = (place >> 8) + 1;
      last_absmax = __ldg(args.weight.absmax + group);
      last_offset = __ldg(args.weight.absmax_offset + group * args.weight.offset_stride);
    }
    unsigned four = kSteps == 1 ? raw[0] : __funnelshift_r(raw[i], raw[i + 1], shift);
    auto scale = [&](int byte) {
      bool early = i * 4 + byte < second;
      float by = early ? absmax[0] : last_absmax, add = early ? offset[0] : last_offset;
      float found = nested_scale(code[four >> 8 * byte & 255], by, add);
      return byte < count ? found : 0.0f;
    };
    return make_float4(scale(0), scale(1), scale(2), scale(3));
  }
};

// The four scales of one row and k step for any block size; beyond the weight they are zeros.
template <typename Traits>
__device__ __forceinline__ float4 any_scales(const WgmmaArgs& args, const float* code, int row, int step) {
  const Nf4Weight& w = args.weight;
  int weight_row = args.weight_row<Traits::kGates>(row);
  int64_t first = int64_t{weight_row} * args.k_blocks + step * 4;
  unsigned place = static_cast<unsigned>(weight_row) * args.place_pitch + step * 4 + args.place_first;
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int64_t at = (first + i) >> args.scale_shift;
    scales[i] = 0.0f;
    if (row >= args.n || step * 4 + i >= args.k_blocks) continue;
    unsigned group = (place + i) >> (args.scale_shift + 8);
    scales[i] = Traits::kNested ? nested_scale(code[__ldg(w.absmax_8bit + at)], __ldg(w.absmax + group),
                                               __ldg(w.absmax_offset + group * w.offset_stride))
                                : __ldg(w.absmax + at);
  }
  return make_float4(scales[0], scales[1], scales[2], scales[3]);
}

// Two warps, of which this is one of the 64 threads, load scales as floats; they decode nested ones.
template <typename Traits>
__device__ __forceinline__ void load_scales(const WgmmaArgs& args, WgmmaLayout<Traits> layout, char* shared,
                                            int thread) {
  using Layout = WgmmaLayout<Traits>;
  constexpr int kPerThread = Layout::kRows / 64;
  // How many k steps' scales are loaded at a time. Beside many sums one is enough: a k step takes longer than the loads
  // of its scales, and registers are short.
  constexpr int kSteps = Traits::kManySums ? 1 : Traits::kNested ? 4 : 2;
  float* code = reinterpret_cast<float*>(shared + Layout::kCode);
  bool code_loaded = !Traits::kNested;
  auto load_code = [&] {
    if (code_loaded) return;
    code_loaded = true;
    for (int i = thread; i < 256; i += 64) code[i] = __ldg(args.weight.absmax_code + i);
    barrier_sync(kScaleBarrier, 64);
  };
  TileScheduler work(args);
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
  while (work.advance(args)) {
    int row = work.tile / args.token_tiles * Layout::kRows + thread, end = work.first_step + work.steps;
    if (!args.own_scales) {
      load_code();
      for (int step = work.first_step; step < end; ++step) {
        wait_stage();
        for (int i = 0; i < kPerThread; ++i) store(i, any_scales<Traits>(args, code, row + i * 64, step));
        commit_stage();
      }
      continue;
    }
    // Batches start on a multiple of their size, where wide scales are aligned.
    for (int batch = work.first_step & -kSteps; batch < end; batch += kSteps) {
      RawScales<Traits::kNested, kSteps> raw[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        raw[i].load(args, args.weight_row<Traits::kGates>(min(row + i * 64, args.n - 1)), batch, end - 1);
      }
      load_code();  // while the first scales are on their way
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (batch + j < work.first_step) continue;
        if (batch + j >= end) break;
        wait_stage();
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) store(i, raw[i].decoded(args, j, args.k_blocks - (batch + j) * 4, code));
        commit_stage();
      }
    }
  }
}

// The four warps behind the consumers': one loads weights, one tokens, two scales.
template <typename Traits>
__device__ __forceinline__ void produce(const WgmmaArgs& args, const CUtensorMap* map, WgmmaLayout<Traits> layout,
                                        char* shared) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, producer = warp - Traits::kConsumerWarps;
  if (producer == 0) {
    if (lane == 0) load_weights<Traits>(args, map, layout);
  } else if (producer == 1) {
    if (lane == 0) load_tokens<Traits>(args, layout);
  } else {
    load_scales<Traits>(args, layout, shared, (producer - 2) * 32 + lane);
  }
}

}  // namespace nf4
