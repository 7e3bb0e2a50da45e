// What linear_mma.cuh loads: codes and activations by cp.async, scales into registers.
#pragma once

#include "layout.cuh"
#include "table.cuh"

namespace nf4 {

__device__ __forceinline__ uint64_t codes_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Copies 16 bytes that are read once; L2 fetches all of their 128. From sm_90 on without the policy: there ptxas 13.0 makes an
// illegal instruction of a copy that has both a policy and a uniform register in its address.
__device__ __forceinline__ void copy_codes(unsigned target, const void* source, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "l"(policy)
               : "memory");
#endif
}

// Loads the codes of a warp's own rows, k step by k step.
template <typename Shape>
struct CodesLoader {
  const uint8_t* from[Shape::kRowTiles];
  uint64_t policy;
  unsigned target;
  MmaStep at;

  __device__ __forceinline__ CodesLoader(const MmaArgs& args, unsigned shared, const MmaStep& first)
      : policy(codes_policy()), at(first) {
    target = shared + Shape::kCodes + threadIdx.x / 32 * Shape::kRowTiles * 512 + threadIdx.x % 32 * 16;
    find_rows(args);
  }
  __device__ __forceinline__ void find_rows(const MmaArgs& args) {
    int lane = threadIdx.x % 32, tile = at.row_tile * kMmaRowTiles + threadIdx.x / 32 * Shape::kRowTiles;
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
      // Rows beyond the weight are copies of its last one.
      int row = args.row_within(tile + i, lane / 2);
      from[i] = args.weight.packed + (int64_t{row} * args.k_steps + at.k_step) * 32 + lane % 2 * 16;
    }
  }
  // Loads the thread block's k step `index` of `count`, which follows the one before.
  __device__ __forceinline__ void load(const MmaArgs& args, unsigned index, unsigned count) {
    if (index >= count) return;
    unsigned to = target + index % Shape::kStages * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
      copy_codes(to + i * 512, from[i], policy);
      from[i] += 32;
    }
    if (++at.k_step == args.k_steps) {
      at.next_tile(args);
      find_rows(args);
    }
  }
};

// Loads chunks of activations, a share of which is each thread's.
template <typename T, typename Shape>
struct ActivationsLoader {
  static constexpr int kPieces = Shape::kChunkSlots * 8, kOfThread = (kPieces + Shape::kThreads - 1) / Shape::kThreads;
  static constexpr int kSteps = Shape::kChunk == 1 ? 1 : kOfThread;  // different k steps of a thread's pieces
  unsigned shared, chunk;
  MmaStep at[kSteps];

  __device__ __forceinline__ ActivationsLoader(const MmaArgs& args, unsigned shared, const MmaStep& first)
      : shared(shared), chunk(0) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      at[i] = first;
      at[i].advance(args, slot_of(i) / Shape::kTokens);
    }
  }
  // The slot of a thread's i-th piece.
  __device__ __forceinline__ static int slot_of(int i) { return (threadIdx.x + i * Shape::kThreads) / 8; }
  // Loads the next chunk, of thread blocks with `count` k steps, as soon as all warps have read the one that lies there.
  __device__ __forceinline__ void load(const MmaArgs& args, unsigned count) {
    if (chunk * Shape::kChunk >= count) return;
    if (chunk >= Shape::kChunks) barrier_wait(Shape::empty(shared, chunk), Shape::parity(chunk) ^ 1);
    unsigned target = shared + Shape::activations(chunk * Shape::kChunk);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      int slot = slot_of(i), token = slot % Shape::kTokens, piece = threadIdx.x % 8;
      if (kPieces % Shape::kThreads && slot >= Shape::kChunkSlots) break;
      const MmaStep& of = at[kSteps == 1 ? 0 : i];
      int row = of.token_tile * Shape::kTokens + token;
      bool valid = row < args.m && chunk * Shape::kChunk + slot / Shape::kTokens < count;
      const T* from = static_cast<const T*>(args.x) + (int64_t{row} * args.k + of.k_step * 64 + piece * 8);
      copy_or_zero(target + slot * kTableStride + piece_offset(token, piece), valid ? from : args.x, valid);
    }
    copies_arrive(Shape::full(shared, chunk));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) at[i].advance(args, Shape::kChunk);
    ++chunk;
  }
};

// The scales of a warp's rows. Thread t of a quad holds those of the k steps t, t + 4, ... of the thread block's, and passes
// them on with shuffles. The next four k steps' codes are loaded while these are multiplied.
template <typename Shape>
struct Scales {
  static constexpr int kRows = Shape::kRowTiles * 2;  // rows of a thread: g and g + 8 of each m16 tile
  float now[kRows];
  unsigned raw[kRows];
  float absmax[kRows], offset[kRows];
  MmaStep at;

  __device__ __forceinline__ Scales(const MmaArgs& args, const MmaStep& first) : at(first) {
    at.advance(args, threadIdx.x % 4);
  }
  // Loads what belongs to the k steps from `index` of `count` on; beyond the last one it is that of any.
  __device__ __forceinline__ void load(const MmaArgs& args, unsigned index, unsigned count) {
    if (index >= count) return;
    int tile = at.row_tile * kMmaRowTiles + threadIdx.x / 32 * Shape::kRowTiles;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int row = args.row_within(tile + i / 2, threadIdx.x % 32 / 4 + i % 2 * 8);
      unsigned scale = static_cast<unsigned>(row * args.k_steps + at.k_step) >> args.scale_shift;
      if (args.weight.absmax_8bit) {
        unsigned group =
            static_cast<unsigned>(args.place_first + row * args.place_pitch + at.k_step) >> (args.scale_shift + 8);
        raw[i] = __ldg(args.weight.absmax_8bit + scale);
        absmax[i] = __ldg(args.weight.absmax + group);
        offset[i] = __ldg(args.weight.absmax_offset + group * args.weight.offset_stride);
      } else {
        absmax[i] = __ldg(args.weight.absmax + scale);
      }
    }
    at.advance(args, 4);
  }
  // Decodes what was loaded.
  __device__ __forceinline__ void decode(const MmaArgs& args, const float* code) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      now[i] = args.weight.absmax_8bit ? nested_scale(code[raw[i]], absmax[i], offset[i]) : absmax[i];
    }
  }
  __device__ __forceinline__ float of(int i, unsigned index) const { return __shfl_sync(~0u, now[i], index % 4, 4); }
};

}  // namespace nf4
