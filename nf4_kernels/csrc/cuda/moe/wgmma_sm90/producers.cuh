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

template <typename Traits>
__device__ __forceinline__ void load_choices(const MoeWgmmaArgs& args, WgmmaLayout<Traits> layout) {
  using Layout = WgmmaLayout<Traits>;
  MoeTiles work(args);
  Ring<Traits::kTokenStages> ring;
  constexpr int kCopies = 4 / Layout::kTokenBlocks;
  while (work.advance<Layout::kRows>(args)) {
    const char* from = args.tiles + int64_t{work.group} * args.steps * kCopies * Layout::kTokenBytes;
    for (int copy = 0; copy < args.steps * kCopies; ++copy, from += Layout::kTokenBytes) {
      barrier_wait(layout.tokens_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.tokens_full(ring.stage);
      expect_bytes(full, Layout::kTokenBytes);
      copy_bytes(layout.tokens(ring.stage), from, Layout::kTokenBytes, full);
      ring.advance();
    }
  }
}

// A row of a tile as one of all experts' rows; beyond the expert's last it is that.
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

// The launch in front, which copies the choices' activations into tiles as tile_activations() does it for tokens; it also
// writes the zeros of choices whose expert does not exist.
template <typename T>
__global__ void tile_choices(const T* x, const int* experts, GroupList list, uint4* tiles, T* zeroed, int columns,
                             int num_experts, int choices, int x_choices, int k_blocks, int padded_blocks) {
  launch_dependents();
  grid_dependency_wait();
  if (zeroed) {
    zero_unknown(experts, num_experts, choices, zeroed, columns, (blockIdx.x * blockDim.x + threadIdx.x) / 32,
                 gridDim.x * blockDim.x / 32);
  }
  int groups = list.count(), row_chunks = padded_blocks * 8;
  int64_t chunks = int64_t{groups} * list.size * row_chunks;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < chunks; at += int64_t{gridDim.x} * blockDim.x) {
    int slot = static_cast<int>(at / row_chunks), rest = static_cast<int>(at - int64_t{slot} * row_chunks);
    int chunk = rest % 8, block = rest / 8, group = slot / list.size, row = slot - group * list.size;
    int choice = load_fresh(list.choices(0) + slot);
    uint4 words = make_uint4(0, 0, 0, 0);
    if (choice >= 0 && block < k_blocks) {
      const unsigned* from =
          reinterpret_cast<const unsigned*>(x + (int64_t{choice / x_choices} * k_blocks + block) * 64) + chunk;
      words = make_uint4(__ldcg(from), __ldcg(from + 8), __ldcg(from + 16), __ldcg(from + 24));
    }
    tiles[((int64_t{group} * padded_blocks + block) * list.size + row) * 8 + (chunk ^ row % 8)] = words;
  }
}

}  // namespace nf4
