// The stages of linear_wgmma.cuh that feed the product: the launch that arranges the activations, the service warps.
#pragma once

#include "wgmma_sums.cuh"

namespace nf4 {

// One thread writes one 16-byte chunk. Tokens beyond m and k beyond the last are zeros. (16-byte reads and an exchange
// between lanes are no faster.)
template <typename T>
__global__ void arrange_tokens(const T* x, uint4* tiles, int m, int k_blocks, int padded_blocks, int tokens,
                               int chunks, uint64_t* clock) {
  let_next_start();
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(clock);
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= chunks) return;
  int chunk = at % 8, block = at / 8 % padded_blocks, token = at / 8 / padded_blocks;
  uint4 words = make_uint4(0, 0, 0, 0);
  if (token < m && block < k_blocks) {
    const unsigned* from = reinterpret_cast<const unsigned*>(x + (int64_t{token} * k_blocks + block) * 64) + chunk;
    // Not __ldg: the kernel in front may write them after this one has started.
    words = make_uint4(__ldcg(from), __ldcg(from + 8), __ldcg(from + 16), __ldcg(from + 24));
  }
  int row = token % tokens;
  int64_t tile = int64_t{token / tokens} * padded_blocks + block;
  tiles[(tile * tokens + row) * 8 + (chunk ^ row % 8)] = words;
}

// The same of normalised activations: a block a token, whose chunks its threads keep in registers.
constexpr int kNormThreads = 512;
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    arrange_normalised(const T* x, const T* weight, float eps, uint4* tiles, int m, int k_blocks, int padded_blocks,
                       int tokens, uint64_t* clock) {
  constexpr int kChunks = NF4_NORM_K / 8 / kNormThreads;
  let_next_start();
  int token = blockIdx.x, thread = threadIdx.x;
  auto word_of = [&](const T* row, int i) {
    int at = thread + i * kNormThreads;
    return reinterpret_cast<const unsigned*>(row + at / 8 * 64) + at % 8;
  };
  unsigned words[kChunks][4] = {}, weights[kChunks][4] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (token >= m || thread + i * kNormThreads >= k_blocks * 8) break;
    const unsigned* from = word_of(weight, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[i][j] = __ldg(from + j * 8);
  }
  wait_for_previous();
  if (token == 0 && thread == 0) clock_start(clock);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (token >= m || thread + i * kNormThreads >= k_blocks * 8) break;
    const unsigned* from = word_of(x + int64_t{token} * k_blocks * 64, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[i][j] = load_fresh(from + j * 8);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 pair = unpack2<T>(words[i][j]);
      squares += pair.x * pair.x + pair.y * pair.y;
    }
  }
  __shared__ float warps[kNormThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (thread % 32 == 0) warps[thread / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) squares += warps[i];
  float by = rsqrtf(squares / (k_blocks * 64) + eps);
  int row = token % tokens;
  int64_t tile = int64_t{token / tokens} * padded_blocks;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    int at = thread + i * kNormThreads, block = at / 8;
    if (block >= padded_blocks) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Rounded before and after the weight, as models do it.
      float2 pair = unpack2<T>(words[i][j]), scale = unpack2<T>(weights[i][j]);
      pair = unpack2<T>(pack2<T>(pair.x * by, pair.y * by));
      words[i][j] = pack2<T>(pair.x * scale.x, pair.y * scale.y);
    }
    tiles[((tile + block) * tokens + row) * 8 + (at % 8 ^ row % 8)] =
        make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
  }
}

template <int kTokens, int kGroups, typename Layout, int kStages, bool kGates>
__device__ __forceinline__ void bring_weights(const WgmmaArgs& args, const CUtensorMap* map, Layout layout) {
  WgmmaRun run(args);
  Ring<kStages> ring;
  while (run.take(args)) {
    int row = run.tile / args.token_tiles * Layout::kRows;
    for (int step = run.first_step; step < run.first_step + run.steps; ++step) {
      barrier_wait(layout.weights_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.weights_full(ring.stage);
      expect_bytes(full, Layout::kWeightBytes);
      if constexpr (kGates) {
        copy_box(layout.weights(ring.stage), map, step * 128, 0, row / 2, full);
      } else {
        copy_box(layout.weights(ring.stage), map, step * 128, row, full);
      }
      ring.advance();
    }
  }
  if (!PartRing<Layout, kTokens, kGroups>::kOfTokens && run.first_step == 0 && run.steps < args.steps) {
    bring_parts<kTokens, kGroups, Layout, kStages>(args, run.tile, layout, ring);
  }
}

template <int kTokens, int kGroups, typename Layout, int kTokenStages>
__device__ __forceinline__ void bring_tokens(const WgmmaArgs& args, Layout layout) {
  WgmmaRun run(args);
  Ring<kTokenStages> ring;
  wait_for_previous();
  if (args.begins && blockIdx.x + blockIdx.y == 0) clock_start(args.clock);
  constexpr int kCopies = 4 / Layout::kTokenBlocks;
  while (run.take(args)) {
    int64_t first = int64_t{run.tile % args.token_tiles} * args.steps + run.first_step;
    const char* from = args.tiles + first * kCopies * Layout::kTokenBytes;
    for (int copy = 0; copy < run.steps * kCopies; ++copy, from += Layout::kTokenBytes) {
      barrier_wait(layout.tokens_empty(ring.stage), ring.parity ^ 1);
      unsigned full = layout.tokens_full(ring.stage);
      expect_bytes(full, Layout::kTokenBytes);
      copy_bytes(layout.tokens(ring.stage), from, Layout::kTokenBytes, full);
      ring.advance();
    }
  }
  if (PartRing<Layout, kTokens, kGroups>::kOfTokens && run.first_step == 0 && run.steps < args.steps) {
    bring_parts<kTokens, kGroups, Layout, kTokenStages>(args, run.tile, layout, ring);
  }
}

// The scales of one row and kSteps stages as they lie in memory, where each stage's four are aligned neighbours. Four
// stages of nested ones are one 16-byte read where the row allows it: a launch's first reads wait behind its weights.
template <bool kNested, int kSteps>
struct RawScales {
  float4 scales[kSteps];
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int step, int last) {
    const float4* from = reinterpret_cast<const float4*>(args.weight.absmax) + int64_t{row} * (args.k_blocks / 4);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) scales[i] = __ldg(from + min(step + i, last));
  }
  __device__ __forceinline__ float4 decoded(int i, const float*) const { return scales[i]; }
};
template <int kSteps>
struct RawScales<true, kSteps> {
  unsigned raw[kSteps];
  float absmax[2], offset[2];  // of the first block and of the last
  int second;                  // the step from which the second count
  __device__ __forceinline__ void load(const WgmmaArgs& args, int row, int step, int last) {
    const Nf4Weight& w = args.weight;
    unsigned first = static_cast<unsigned>(row) * args.k_blocks + step * 4;
    if (kSteps == 4 && args.wide_scales) {
      uint4 words = __ldg(reinterpret_cast<const uint4*>(w.absmax_8bit + first));
      raw[0] = words.x, raw[1 % kSteps] = words.y, raw[2 % kSteps] = words.z, raw[3 % kSteps] = words.w;
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        raw[i] = __ldg(reinterpret_cast<const unsigned*>(w.absmax_8bit + first) + min(i, last - step));
      }
    }
    unsigned group = first >> 8, end = (first + min(kSteps - 1, last - step) * 4) >> 8;
    second = static_cast<int>((256 - first % 256) / 4);
    absmax[0] = __ldg(w.absmax + group);
    absmax[1] = __ldg(w.absmax + end);
    offset[0] = __ldg(w.absmax_offset + group * w.offset_stride);
    offset[1] = __ldg(w.absmax_offset + end * w.offset_stride);
  }
  __device__ __forceinline__ float4 decoded(int i, const float* code) const {
    float by = i < second ? absmax[0] : absmax[1], add = i < second ? offset[0] : offset[1];
    auto scale = [&](int byte) { return nested_scale(code[raw[i] >> 8 * byte & 255], by, add); };
    return make_float4(scale(0), scale(1), scale(2), scale(3));
  }
};

// The same for any k and block size; zeros beyond the weight.
template <bool kNested, bool kGates>
__device__ __forceinline__ float4 load_scales(const WgmmaArgs& args, const float* code, int row, int step) {
  const Nf4Weight& w = args.weight;
  int64_t first = int64_t{args.weight_row<kGates>(row)} * args.k_blocks + step * 4;
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int64_t at = (first + i) >> args.scale_shift;
    scales[i] = 0.0f;
    if (row >= args.n || step * 4 + i >= args.k_blocks) continue;
    int64_t group = at >> 8;
    scales[i] = kNested ? nested_scale(code[__ldg(w.absmax_8bit + at)], __ldg(w.absmax + group),
                                       __ldg(w.absmax_offset + group * w.offset_stride))
                        : __ldg(w.absmax + at);
  }
  return make_float4(scales[0], scales[1], scales[2], scales[3]);
}

template <typename Layout, int kStages, bool kNested, bool kGates>
__device__ __forceinline__ void bring_scales(const WgmmaArgs& args, Layout layout, char* shared, int thread) {
  constexpr int kPerThread = Layout::kRows / 64;
  constexpr int kSteps = Layout::kSlow ? 1 : kNested ? 4 : 2;
  float* code = reinterpret_cast<float*>(shared + Layout::kCode);
  bool code_there = !kNested;
  auto bring_code = [&] {
    if (code_there) return;
    code_there = true;
    for (int i = thread; i < 256; i += 64) code[i] = __ldg(args.weight.absmax_code + i);
    barrier_sync(8, 64);
  };
  WgmmaRun run(args);
  Ring<kStages> ring;
  auto put = [&](int i, float4 scales) {
    float* target = reinterpret_cast<float*>(shared + Layout::kScales + ring.stage * Layout::kScaleBytes) + thread;
    target[i * 64] = scales.x;
    target[i * 64 + Layout::kRows] = scales.y;
    target[i * 64 + 2 * Layout::kRows] = scales.z;
    target[i * 64 + 3 * Layout::kRows] = scales.w;
  };
  auto wait_stage = [&] { barrier_wait(layout.weights_empty(ring.stage), ring.parity ^ 1); };
  auto send_stage = [&] {
    barrier_arrive(layout.scales_full(ring.stage));
    ring.advance();
  };
  while (run.take(args)) {
    int row = run.tile / args.token_tiles * Layout::kRows + thread, end = run.first_step + run.steps;
    if (!args.whole_scales) {
      bring_code();
      for (int step = run.first_step; step < end; ++step) {
        wait_stage();
        for (int i = 0; i < kPerThread; ++i) put(i, load_scales<kNested, kGates>(args, code, row + i * 64, step));
        send_stage();
      }
      continue;
    }
    // In batches that start on a multiple of their size.
    for (int batch = run.first_step & -kSteps; batch < end; batch += kSteps) {
      RawScales<kNested, kSteps> raw[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        raw[i].load(args, args.weight_row<kGates>(min(row + i * 64, args.n - 1)), batch, end - 1);
      }
      bring_code();  // while the first scales are on their way
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (batch + j < run.first_step) continue;
        if (batch + j >= end) break;
        wait_stage();
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) put(i, raw[i].decoded(j, code));
        send_stage();
      }
    }
  }
}

}  // namespace nf4
