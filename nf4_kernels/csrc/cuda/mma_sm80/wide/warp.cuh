// A warp's part of linear_mma_wide.cuh: its operands, and the products of half a k step.
#pragma once

#include "../../mma.cuh"
#include "../epilogue.cuh"
#include "layout.cuh"

namespace nf4 {

// The A registers of 32 k, for twice 16 k.
template <typename Shape>
struct WideOperands {
  static constexpr int kCount = Shape::kRowTiles * 8;
  unsigned a[Shape::kRowTiles][2][4];
  // Decodes operand `index` of all: its entry in this lane's copy of the table.
  __device__ __forceinline__ void decode(int index, const unsigned (&codes)[Shape::kRowTiles][2], unsigned lane_offset) {
    int i = index / 8, s = index / 4 % 2, r = index % 4;
    asm volatile("ld.shared.b32 %0, [%1 + %2];"
                 : "=r"(a[i][s][r])
                 : "r"(__byte_perm(codes[i][r % 2], lane_offset, 0x7504 | (s * 2 + r / 2) << 4)), "n"(kSharedBase));
  }
};

template <typename T, typename Shape>
struct WideWarp {
  static constexpr int kRowTiles = Shape::kRowTiles, kTiles = Shape::kTiles, kGroup = Shape::kGroup;
  static constexpr int kGroups = Shape::kGroups, kBatches = 2 * kTiles, kOperands = WideOperands<Shape>::kCount;
  unsigned base, lane_offset, codes, tokens, ratios;
  WideOperands<Shape> operands[2];  // of the two halves of a k step
  unsigned words[kRowTiles][2];     // codes of a thread's rows, for 32 k
  uint4 b[2][kGroup];
  float acc[kRowTiles][kTiles][4];

  // Decodes what belongs to the first half step, and reads its first activations.
  __device__ __forceinline__ explicit WideWarp(unsigned base) : base(base), acc{} {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    lane_offset = lane * 4;
    codes = base + Shape::row_warp() * kRowTiles * 512 + g * 32 + (g / 4 * 16 | t * 4);
    tokens = base + (Shape::token_warp() * kTiles * 8 + g) * kTableStride + (t ^ g % 2 * 4) * 16;
    ratios = base + (Shape::row_warp() * 8 + g) * (kRowTiles * 8);
    keep(lane_offset);
    keep(codes);
    keep(tokens);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) read_codes(i, codes + Shape::codes(0));
#pragma unroll
    for (int i = 0; i < kOperands; ++i) operands[0].decode(i, words, lane_offset);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) read_tokens(0, 0, 0, j);
  }
  __device__ __forceinline__ void read_codes(int i, unsigned from) {
#pragma unroll
    for (int r = 0; r < 2; ++r) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i][r]) : "r"(from + i * 512 + r * 256));
  }
  // Reads the B operands of token tile j of a group, for 32 k.
  __device__ __forceinline__ void read_tokens(unsigned index, int half, int group, int j) {
    if (group * kGroup + j >= kTiles) return;
    unsigned from = (half ? tokens ^ 64 : tokens) + Shape::activations(index);
    b[(half * kGroups + group) % 2][j] = load_operand(from + (group * kGroup + j) * 8 * kTableStride);
  }
  // Decodes operand by operand what the next half step multiplies, in the batches between the first and the last.
  __device__ __forceinline__ void decode(int batch, int half, unsigned from) {
    if (batch == 0) read_codes(0, from);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      if (1 + i * (kBatches - 2) / kOperands != batch) continue;
      if (i % 8 == 0 && i / 8 + 1 < kRowTiles) read_codes(i / 8 + 1, from);
      operands[1 - half].decode(i, words, lane_offset);
    }
  }
  // Multiplies half a k step and decodes what the next one multiplies; what is beyond the last one is not used. load(): issues
  // what is loaded meanwhile.
  template <typename Load>
  __device__ __forceinline__ void half_step(unsigned index, int half, const float (&ratio)[kRowTiles * 2], Load load) {
    unsigned decoded = half ? codes + Shape::codes(index + 1) : (codes ^ 16) + Shape::codes(index);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      // A batch is a token tile and 16 k, of a group's token tiles and 32 k.
      int group = batch / (2 * kGroup), tiles = min(kGroup, kTiles - group * kGroup);
      int s = (batch - group * 2 * kGroup) / tiles, j = (batch - group * 2 * kGroup) % tiles;
      bool last = group == kGroups - 1;
      if (batch == kTiles) load();
      if (last && s == 0 && j == 0) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(Shape::read(base, index, half));
        barrier_wait(Shape::full(base, index + half, 1 - half), Shape::parity(index + half));
      }
      if (s == 0) {
#pragma unroll
        for (int next = j; next < kGroup; next += tiles) {
          read_tokens(last ? index + half : index, last ? 1 - half : half, last ? 0 : group + 1, next);
        }
      }
      decode(batch, half, decoded);
      const uint4& of = b[(half * kGroups + group) % 2][j];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        float(&sum)[4] = acc[i][group * kGroup + j];
#pragma unroll
        for (int e = 0; e < 4 && half == 0 && s == 0; ++e) sum[e] *= ratio[i * 2 + e / 2];
        mma<T>(sum, operands[half].a[i][s], s ? of.z : of.x, s ? of.w : of.y, sum);
      }
    }
  }
  // What sums are multiplied by in front of a k step.
  __device__ __forceinline__ void read_ratios(float (&to)[kRowTiles * 2], unsigned index) const {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; i += 4) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
                   : "r"(ratios + Shape::ratios(index) + i * 4));
    }
  }
  __device__ __forceinline__ void scale(const float (&ratio)[kRowTiles * 2]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] *= ratio[i * 2 + e / 2];
      }
    }
  }
  // Writes all sums. They come from shared memory, where only ratios are still read: the loop over them is short code.
  __device__ __forceinline__ void write(const MmaArgs& args, const MmaStep& at, char* shared) const {
    constexpr int kSums = kRowTiles * kTiles, kRoom = Shape::kRatios / (Shape::kThreads * 16);
    constexpr int kHeld = kSums < kRoom ? kSums : kRoom;
    float4* held = reinterpret_cast<float4*>(shared) + threadIdx.x;
    Writer<T, MmaArgs> writer = writer_of<T, Shape>(args, at);
#pragma unroll
    for (int first = 0; first < kSums; first += kHeld) {
      int end = min(first + kHeld, kSums);
#pragma unroll
      for (int u = first; u < end; ++u) {
        const float(&of)[4] = acc[u / kTiles][u % kTiles];
        held[(u - first) * Shape::kThreads] = make_float4(of[0], of[1], of[2], of[3]);
      }
#pragma unroll 1
      for (int u = first; u < end; ++u) writer.write(args, u / kTiles, u % kTiles, held[(u - first) * Shape::kThreads]);
    }
  }
};

}  // namespace nf4
