// GEMM with an NF4 weight on mma.sync, from Ampere on: codes stream through shared memory and become operands in registers.
//
// A tile is 256 weight rows (the m of mma m16n8k16) x 8 to 64 tokens (its n). A k step is 64 k of a tile. All tiles' k steps
// in order are divided evenly among as many thread blocks as there are multiprocessors (stream-K). Each warp has 32 rows of
// the tile and all of its tokens:
//   codes of its rows come into a ring of its own by cp.async, in bitsandbytes' order; activations into one that all share
//   a byte is two neighbouring k of a row, which is one A register: a table of 256 entries has it, with a copy for each bank
//   the sums of 64 k are multiplied by the rows' scales and added up in float32
// The thread blocks of a split tile leave their sums in memory, and then each adds up a share of them, in the order of k, so
// results do not depend on timing.
//
// Within 64 k, lane t of a quad takes weights 16t..16t+15 (8 contiguous bytes), and the activations are picked to match.
#pragma once

#include "epilogue.cuh"
#include "loads.cuh"
#include "multiply.cuh"

namespace nf4 {

// The A registers of a k step: those of a warp's m16 tiles, each for four times 16 k.
template <typename Shape>
struct Operands {
  static constexpr int kCount = Shape::kRowTiles * 16;
  unsigned a[Shape::kRowTiles][4][4];
};

// 8 bytes of each of a thread's rows, which become operands.
template <typename Shape>
struct Codes {
  uint2 of[Shape::kRowTiles][2];
  __device__ __forceinline__ explicit Codes(unsigned from) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * 2; ++i) {
      uint2& to = of[i / 2][i % 2];
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "r"(from + i * 256));
    }
  }
  // Decodes operand `index` of all: its entry in this lane's copy of the table.
  __device__ __forceinline__ void decode(Operands<Shape>& to, int index, unsigned lane_offset) const {
    int i = index / 16, s = index / 4 % 4, r = index % 4;
    unsigned word = s < 2 ? of[i][r % 2].x : of[i][r % 2].y;
    asm volatile("ld.shared.b32 %0, [%1 + %2];"
                 : "=r"(to.a[i][s][r])
                 : "r"(__byte_perm(word, lane_offset, 0x7504 | (s % 2 * 2 + r / 2) << 4)), "n"(kSharedBase));
  }
};

template <typename T, int kWarps, int kTiles>
__global__ void __launch_bounds__(kWarps * 32, 1) linear_mma(const __grid_constant__ MmaArgs args) {
#if __CUDA_ARCH__ >= 800
  using Shape = MmaShape<kWarps, kTiles>;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if (base != kSharedBase) __trap();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(args.clock);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  int first = args.first_step(blockIdx.x);
  unsigned count = args.first_step(blockIdx.x + 1) - first;
  MmaStep at(args, first);
  if (threadIdx.x < 2 * Shape::kChunks) {
    barrier_init(Shape::full(base, 0) + threadIdx.x * 8, threadIdx.x < Shape::kChunks ? Shape::kThreads : kWarps);
  }
  copy_scale_code(args.weight, base + Shape::kScaleCode, Shape::kThreads);
  copies_commit();
  CodesLoader<Shape> codes_loader(args, base, at);
#pragma unroll
  for (int i = 0; i < Shape::kCodesAhead; ++i) {
    codes_loader.load(args, i, count);
    copies_commit();
  }
  ActivationsLoader<T, Shape> activations_loader(args, base, at);
  Scales<Shape> scales(args, at);
  scales.load(args, 0, count);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Shape::kChunksAhead; ++i) activations_loader.load(args, count);
  fill_table<T>(shared, Shape::kThreads);
  const float* code = reinterpret_cast<const float*>(shared + Shape::kScaleCode);
  copies_wait<Shape::kCodesAhead>();
  __syncthreads();

  unsigned codes = base + Shape::kCodes + warp * Shape::kRowTiles * 512 + lane * 8;
  unsigned tokens = base + g * kTableStride + piece_offset(g, 2 * t), lane_offset = lane * 4;
  keep(codes);
  keep(tokens);
  keep(lane_offset);
  Operands<Shape> operands;
  constexpr int kOperands = Operands<Shape>::kCount;
  if constexpr (Shape::kDecodesAhead) {
    copies_wait<Shape::kCodesAhead - 1>();
    __syncwarp();
    Codes<Shape> read(codes);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) read.decode(operands, i, lane_offset);
  }
  float acc[Shape::kRowTiles][kTiles][4];
  unsigned index = 0;  // of the thread block's k steps
  // Multiplies a k step, and decodes the next one's codes.
  auto step = [&](Operands<Shape>& operands, Operands<Shape>& decoded) {
    unsigned chunk = index / Shape::kChunk;
    bool begins = Shape::kChunk == 1 || index % Shape::kChunk == 0;
    copies_wait<Shape::kPending>();
    __syncwarp();
    if (begins) barrier_wait(Shape::full(base, chunk), Shape::parity(chunk));
    if (index % 4 == 0) {
      scales.decode(args, code);
      scales.load(args, index + 4, count);
    }
    float scale[Shape::kRowTiles * 2];
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * 2; ++i) scale[i] = scales.of(i, index);
    // What is beyond the last step is decoded, too, and not used.
    Codes<Shape> read(codes + (index + Shape::kDecodesAhead) % Shape::kStages * Shape::kStageBytes);
    if constexpr (!Shape::kDecodesAhead) {
#pragma unroll
      for (int i = 0; i < kOperands; ++i) read.decode(operands, i, lane_offset);
    }
    multiply_step<T, Shape, false>(acc, operands.a, tokens + Shape::activations(index), scale, [&](int block) {
      if (block == Shape::kLoadBlock) {
        if (begins) activations_loader.load(args, count);
        codes_loader.load(args, index + Shape::kCodesAhead, count);
        copies_commit();
      }
#pragma unroll
      for (int i = 0; Shape::kDecodesAhead && i < kOperands; ++i) {
        if (i * Shape::kBlocks / kOperands == block) read.decode(decoded, i, lane_offset);
      }
    });
    ++index;
    if (index % Shape::kChunk == 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(Shape::empty(base, chunk));
    }
  };
  int split_first = -1, split_last = -1;  // tiles that other thread blocks have a part of
  while (index < count) {
    bool whole = at.k_step == 0 && count - index >= args.k_steps;
    bool ends_later = at.k_step == 0;
    unsigned end = min(count, index + args.k_steps - at.k_step);
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;
    }
    if constexpr (Shape::kDecodesAhead) {
      Operands<Shape> other;
      while (true) {
        step(operands, other);
        if (index == end) {
          operands = other;
          break;
        }
        step(other, operands);
        if (index == end) break;
      }
    } else {
      while (index < end) step(operands, operands);
    }
    if (whole) {
      Writer<T, MmaArgs> writer = writer_of<T, Shape>(args, at);
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const float(&sum)[4] = acc[i][j];
          writer.write(args, i, j, make_float4(sum[0], sum[1], sum[2], sum[3]));
        }
      }
    } else {
      leave_sums<Shape>(args, at.tile(args), acc);
      (ends_later ? split_last : split_first) = at.tile(args);
    }
    at.next_tile(args);
  }
  if (split_first >= 0) reduce_tile<T, Shape>(args, split_first);
  if (split_last >= 0) reduce_tile<T, Shape>(args, split_last);
  if (threadIdx.x == 0) clock_end(args.clock);
#endif
}

}  // namespace nf4
