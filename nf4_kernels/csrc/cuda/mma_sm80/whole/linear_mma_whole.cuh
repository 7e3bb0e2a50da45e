// GEMM of few tokens with an NF4 weight on mma.sync, from Ampere on: thread blocks compute whole tiles.
//
// A tile is 16 or 32 weight rows (the m of mma m16n8k16) for each of a thread block's row warps x 8 to 96 tokens. Where a thread
// block has more warps than its rows take, k warps share the k of the same rows and add up their sums in shared memory. So no
// thread block waits for another one, and none begins or ends within a tile.
//   codes of its rows are loaded into registers a step ahead, in bitsandbytes' order
//   one, two or four more warps load activations into a ring that all share
//   a byte is two neighbouring k of a row, which is one A register: a table of 256 entries has it, with a copy for each bank
//   the sums of 64 k are multiplied by the rows' scales and added up in float32
//
// Within 64 k, lane t of a quad takes weights 16t..16t+15 (8 contiguous bytes), and the activations are picked to match.
#pragma once

#include "../multiply.cuh"
#include "../writer.cuh"
#include "loads.cuh"

namespace nf4 {

// The A registers of a k block, for four times 16 k.
template <typename Shape>
struct BlockOperands {
  unsigned a[Shape::kRowTiles][4][4];
  // Decodes all, each from its entry in this lane's copy of the table.
  __device__ __forceinline__ void decode(const uint2 (&codes)[Shape::kRows], unsigned lane_offset) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * 16; ++i) {
      int tile = i / 16, s = i / 4 % 4, r = i % 4;
      const uint2& row = codes[tile * 2 + r % 2];
      // The table does not change: it may be read at any time.
      asm("ld.shared.b32 %0, [%1 + %2];"
          : "=r"(a[tile][s][r])
          : "r"(__byte_perm(s < 2 ? row.x : row.y, lane_offset, 0x7504 | (s % 2 * 2 + r / 2) << 4)), "n"(kSharedBase));
    }
  }
};

// Adds the sums of the k warps in their order: those of all but the first are handed over where activations lay. These have been
// read by all warps, and none are under way.
template <typename Shape>
__device__ __forceinline__ void add_k_warps(const WholeArgs& args, char* shared, int row_warp, int k_warp,
                                            float (&acc)[Shape::kRowTiles][Shape::kTiles][4]) {
  constexpr int kSums = Shape::kRowTiles * Shape::kTiles;
  int lane = threadIdx.x % 32;
  auto place = [&](int of, int i) {
    int slot = ((of - 1) * args.row_warps + row_warp) * (kSums * 4) + i * 4 + lane / 8;
    return reinterpret_cast<float4*>(shared + slot_offset(slot) + lane % 8 * 16);
  };
  __syncthreads();
  if (k_warp > 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float(&of)[4] = acc[i / Shape::kTiles][i % Shape::kTiles];
      *place(k_warp, i) = make_float4(of[0], of[1], of[2], of[3]);
    }
  }
  __syncthreads();
  if (k_warp > 0) return;
#pragma unroll 1
  for (int other = 1; other < args.k_warps; ++other) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float(&of)[4] = acc[i / Shape::kTiles][i % Shape::kTiles];
      float4 more = *place(other, i);
      of[0] += more.x;
      of[1] += more.y;
      of[2] += more.z;
      of[3] += more.w;
    }
  }
}

// Computes a consumer warp's rows of the tiles from `tile` to `end`. The first step's codes and scales are loaded.
template <typename T, typename Shape>
__device__ __forceinline__ void consume(const WholeArgs& args, char* shared, int tile, int end, int row_warp, int k_warp,
                                        RowsLoader<Shape>& rows) {
  constexpr int kRowTiles = Shape::kRowTiles, kTiles = Shape::kTiles, kChunk = Shape::kChunk;
  const float* code = reinterpret_cast<const float*>(shared + Shape::kScaleCode);
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4;
  unsigned tokens = base + g * kTableStride + piece_offset(g, 2 * t), first = Shape::offset(0, k_warp * kChunk);
  unsigned further = Shape::offset(1, k_warp * kChunk) - first;  // of the second part
  tokens += first;
  keep(tokens);
  keep(lane_offset);
  unsigned step = 0;
  while (true) {
    float acc[kRowTiles][kTiles][4] = {};
#pragma unroll 1
    for (int left = args.steps; left > 0; --left, ++step) {
      rows.decode_scales(args, code);
      if (left > 1) {
        rows.advance(args);
      } else if (tile + 1 < end) {
        rows.begin(args, (tile + 1) / args.token_tiles, row_warp, k_warp);
      } else {
        rows.end();
      }
      rows.load_scales(args);
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        unsigned chunk = step * Shape::kStepChunks + u / kChunk, part = Shape::part(chunk);
        unsigned activations = tokens + (Shape::kParts == 2 ? part * further : quarter_offset(part) - quarter_offset(0));
        float factor[Shape::kRows];
#pragma unroll
        for (int i = 0; i < Shape::kRows; ++i) factor[i] = rows.of(Shape::kRescales ? rows.ratios : rows.scales, i, u);
        if (u % kChunk == 0) barrier_wait(Shape::full(base, part), Shape::parity(chunk));
        BlockOperands<Shape> block;
        block.decode(rows.codes[u], lane_offset);
        rows.load(u);
        activations += u % kChunk * (Shape::kTokens * kTableStride);
        multiply_step<T, Shape, Shape::kRescales>(acc, block.a, activations, factor, [](int) {});
        if ((u + 1) % kChunk == 0) {
          __syncwarp();
          if (lane == 0) barrier_arrive(Shape::empty(base, part));
        }
      }
    }
    if constexpr (Shape::kRescales) {
#pragma unroll
      for (int i = 0; i < Shape::kRows; ++i) {
        float last = rows.of(rows.scales, i, kStepBlocks - 1);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          acc[i / 2][j][i % 2 * 2] *= last;
          acc[i / 2][j][i % 2 * 2 + 1] *= last;
        }
      }
    }
    if (args.k_warps > 1) add_k_warps<Shape>(args, shared, row_warp, k_warp, acc);
    if (k_warp == 0) {
      int row_tile = tile / args.token_tiles, token_tile = tile - row_tile * args.token_tiles;
      Writer<T, WholeArgs> writer(args, (row_tile * args.row_warps + row_warp) * kRowTiles, token_tile * Shape::kTokens);
      constexpr int kUnits = kRowTiles * kTiles;
      float4 sums[kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float(&of)[4] = acc[u / kTiles][u % kTiles];
        sums[u] = make_float4(of[0], of[1], of[2], of[3]);
      }
      // A loop over many is short code, since it runs once: they are in local memory.
#pragma unroll (kUnits < 8 ? kUnits : 1)
      for (int u = 0; u < kUnits; ++u) writer.write(args, u / kTiles, u % kTiles, sums[u]);
    }
    if (++tile >= end) break;
    // The sums that were handed over have been read.
    if (args.k_warps > 1) __syncthreads();
  }
}

// Loads a loader's share of the activations of the tiles from `tile` to `end`.
template <typename T, typename Shape>
__device__ __forceinline__ void produce(const WholeArgs& args, unsigned shared, int tile, int end, int loader) {
  unsigned step = 0;
  while (true) {
    load_tokens<T, Shape>(args, shared, loader, tile % args.token_tiles, step);
    // As add_k_warps() and consume() do.
    if (args.k_warps > 1) {
      __syncthreads();
      __syncthreads();
    }
    if (++tile >= end) break;
    if (args.k_warps > 1) __syncthreads();
  }
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) linear_mma_whole(const __grid_constant__ WholeArgs args) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if (base != kSharedBase) __trap();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(args.clock);
  int warp = threadIdx.x / 32, k_warp = warp / args.row_warps, row_warp = warp - k_warp * args.row_warps;
  int consumers = args.row_warps * args.k_warps, loader = warp - consumers;
  int tile = blockIdx.x * args.tiles_of_block, end = min(tile + args.tiles_of_block, args.tiles);
  if (loader >= 0) {
    // Loads begin before the table is there.
    unsigned i = threadIdx.x - consumers * 32;
    if (i < 2 * Shape::kParts) barrier_init(base + Shape::kBarriers + i * 8, i < Shape::kParts ? args.loaders * 32 : consumers);
    barrier_sync(kLoadersBarrier, args.loaders * 32);
    barrier_signal(kReadyBarrier, blockDim.x);
    return produce<T, Shape>(args, base, tile, end, loader);
  }
  RowsLoader<Shape> rows;
  rows.begin(args, tile / args.token_tiles, row_warp, k_warp);
#pragma unroll
  for (int u = 0; u < kStepBlocks; ++u) rows.load(u);
  rows.load_scales(args);
  copy_scale_code(args.weight, base + Shape::kScaleCode, consumers * 32);
  copies_commit();
  fill_table<T>(shared, consumers * 32);
  copies_wait<0>();
  barrier_sync(kReadyBarrier, blockDim.x);
  consume<T, Shape>(args, shared, tile, end, row_warp, k_warp, rows);
  if (threadIdx.x == 0) clock_end(args.clock);
#endif
}

}  // namespace nf4
