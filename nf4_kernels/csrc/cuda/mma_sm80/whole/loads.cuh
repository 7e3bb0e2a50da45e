// What linear_mma_whole.cuh loads: codes and scales into registers, activations by cp.async.
#pragma once

#include "layout.cuh"

namespace nf4 {

// Loads 8 bytes that are read once, if asked to; L2 fetches all of their 128.
__device__ __forceinline__ void load_codes(uint2& to, const uint8_t* from, bool valid) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2]; }"
      : "+r"(to.x), "+r"(to.y)
      : "l"(from), "r"(static_cast<int>(valid)));
}

// Sums can be in units of any scale but zero.
constexpr float kLeastScale = 1e-18f;

// A consumer warp's own rows: their codes, held in registers, and their scales. Both are loaded one step ahead.
template <typename Shape>
struct RowsLoader {
  static constexpr int kRows = Shape::kRows;
  uint2 codes[kStepBlocks][kRows];  // 8 bytes of each of a thread's rows for each k block of a step
  const uint8_t* from[kRows];       // the next step's codes
  // Thread t of a quad has what belongs to the step's t-th k block, and passes it on with shuffles: the scales, and what sums in
  // units of the k block before must be multiplied by.
  float scales[kRows] = {}, ratios[kRows], absmax[kRows], offset[kRows];
  unsigned raw[kRows];
  unsigned at[kRows], place[kRows];  // the thread's k block, of all in order; and in the groups of nested scales
  int left;                          // k blocks of the tile from the next step's first one on

  // Goes to the beginning of a row tile.
  __device__ __forceinline__ void begin(const WholeArgs& args, int row_tile, int row_warp, int k_warp) {
    int tile = (row_tile * args.row_warps + row_warp) * Shape::kRowTiles, block = k_warp * kStepBlocks, t = threadIdx.x % 4;
    left = args.k_steps - block;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Rows beyond the weight are copies of its last one.
      int row = args.row_within(tile + i / 2, threadIdx.x % 32 / 4 + i % 2 * 8);
      at[i] = static_cast<unsigned>(row) * args.k_steps + block;
      from[i] = args.weight.packed + (uint64_t{at[i]} * 32 + t * 8);
      at[i] += t;
      place[i] = args.place_first + row * args.place_pitch + block + t;
    }
  }
  __device__ __forceinline__ void advance(const WholeArgs& args) {
    int blocks = args.k_warps * kStepBlocks;
    left -= blocks;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from[i] += blocks * 32;
      at[i] += blocks;
      place[i] += blocks;
    }
  }
  __device__ __forceinline__ void end() { left = 0; }
  // Loads the codes of the step's u-th k block.
  __device__ __forceinline__ void load(int u) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_codes(codes[u][i], from[i] + u * 32, u < left);
  }
  // Loads the step's scales. Beyond the last k block, where all products are zero, they are zero, too; or one where sums are in
  // units of them, which would overflow in small units.
  __device__ __forceinline__ void load_scales(const WholeArgs& args) {
    constexpr float kBeyond = Shape::kRescales ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      raw[i] = 0;
      absmax[i] = args.weight.absmax_8bit ? 0.0f : kBeyond;
      offset[i] = kBeyond;
    }
    if (static_cast<int>(threadIdx.x % 4) >= left) return;
    if (args.weight.absmax_8bit) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        unsigned group = place[i] >> (args.scale_shift + 8);
        raw[i] = __ldg(args.weight.absmax_8bit + (at[i] >> args.scale_shift));
        absmax[i] = __ldg(args.weight.absmax + group);
        offset[i] = __ldg(args.weight.absmax_offset + group * args.weight.offset_stride);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) absmax[i] = __ldg(args.weight.absmax + (at[i] >> args.scale_shift));
    }
  }
  // Decodes the loaded scales.
  __device__ __forceinline__ void decode_scales(const WholeArgs& args, const float* code) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float scale = args.weight.absmax_8bit ? nested_scale(code[raw[i]], absmax[i], offset[i]) : absmax[i];
      if constexpr (Shape::kRescales) {
        if (fabsf(scale) < kLeastScale) scale = kLeastScale;
        int t = threadIdx.x % 4;
        ratios[i] = __fdividef(__shfl_sync(~0u, t == 3 ? scales[i] : scale, (t + 3) % 4, 4), scale);
      }
      scales[i] = scale;
    }
  }
  __device__ __forceinline__ float of(const float (&values)[kRows], int i, int u) const {
    return __shfl_sync(~0u, values[i], u, 4);
  }
};

// Loads a loader's share of a tile's activations, chunk by chunk, as soon as all warps have read what lies there; `step` counts
// all tiles' steps. Loaders take turns: a k block is one's.
template <typename T, typename Shape>
__device__ __forceinline__ void load_tokens(const WholeArgs& args, unsigned shared, int loader, int token_tile,
                                            unsigned& step) {
  constexpr int kAtOnce = 4;  // tokens of which a warp loads 64 k
  int lane = threadIdx.x % 32, piece = lane % 8, token = token_tile * Shape::kTokens + lane / 8;
  const T* row = static_cast<const T*>(args.x) + (int64_t{token} * args.k + piece * 8);
  unsigned to = shared + lane / 8 * kTableStride + piece_offset(lane / 8, piece);
  int blocks = args.k_warps * Shape::kChunk;
#pragma unroll 1
  for (int s = 0; s < args.steps; ++s, ++step) {
#pragma unroll
    for (int j = 0; j < Shape::kStepChunks; ++j) {
      unsigned chunk = step * Shape::kStepChunks + j, part = Shape::part(chunk);
      barrier_wait(Shape::empty(shared, part), Shape::parity(chunk) ^ 1);
#pragma unroll 1
      for (int b = (loader + chunk * blocks) & (args.loaders - 1); b < blocks; b += args.loaders) {
        int block = (s * args.k_warps + b / Shape::kChunk) * kStepBlocks + j * Shape::kChunk + b % Shape::kChunk;
        unsigned target = to + Shape::offset(part, b);
        const T* from = row + block * 64;
        bool inside = block < args.k_steps;
#pragma unroll
        for (int i = 0; i < Shape::kTokens / kAtOnce; ++i) {
          bool valid = inside && token + i * kAtOnce < args.m;
          copy_or_zero(target + i * kAtOnce * kTableStride, valid ? from + int64_t{i * kAtOnce} * args.k : args.x, valid);
        }
      }
      copies_arrive(Shape::full(shared, part));
    }
  }
}

}  // namespace nf4
