// What an instance of linear_wgmma.cuh is: its tile, its stages, where scales are applied, its registers; and its arguments.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#include <type_traits>

#include "../gate.cuh"

namespace nf4 {

// What a weight's scales multiply. The tensor cores add up products of codes and activations; every 64 k have a scale.
enum class ScaleOn {
  kWeights,             // the codes, before they are rounded to 16 bit: the tensor cores add up all k in one accumulator
  kSums,                // the sums of each 64 k, in float32, once the tensor cores are done with them
  kDoubleBufferedSums,  // the same, while the tensor cores are busy with the next 64 k
};

template <int kTokens_, int kGroups_, int kStages_, int kTokenStages_, ScaleOn kScaleOn_, bool kPingPong_>
struct WgmmaInstance {
  static constexpr int kTokens = kTokens_;            // of a tile
  static constexpr int kGroups = kGroups_;            // consumer warpgroups; each has 64 rows of a tile
  static constexpr int kStages = kStages_;            // of the weights' ring
  static constexpr int kTokenStages = kTokenStages_;  // of the tokens' ring
  static constexpr ScaleOn kScaleOn = kScaleOn_;
  static constexpr bool kPingPong = kPingPong_;  // the consumer warpgroups use the tensor cores alternately
};

template <typename T_, typename Instance, bool kNested_, bool kGates_>
struct WgmmaTraits : Instance {
  using T = T_;
  using Instance::kGroups;
  using Instance::kTokens;
  static constexpr bool kNested = kNested_;  // the scales are nested
  static constexpr bool kGates = kGates_;    // the epilogue is a gated activation

  static constexpr int kRows = kGroups * 64;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kConsumers = kGroups * 128;  // threads
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kSums = kTokens / 2;  // of a tile, in a consumer thread
  static constexpr bool kScaledWeights = Instance::kScaleOn == ScaleOn::kWeights;
  static constexpr bool kDoubleBuffered = Instance::kScaleOn == ScaleOn::kDoubleBufferedSums;
  // Weights that are scaled before they are rounded come from pairs of float16 codes where they are rounded to bfloat16,
  // which is coarser, and from pairs of floats where they are rounded to float16.
  static constexpr bool kHalfCodes = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kPairBytes = kScaledWeights && !kHalfCodes ? 8 : 4;  // of a table's entry in one lane's copy

  // A multiprocessor's registers, divided among the warpgroups by setmaxnreg.
  static_assert(kGroups == 2 || kGroups == 3, "registers are divided for two or three consumer warpgroups");
  static constexpr bool kManySums = kTokens > 224;
  static constexpr int kProducerRegisters = kManySums ? 56 : kGroups == 2 ? 72 : 80;
  static constexpr int kConsumerRegisters = kManySums ? 224 : kGroups == 2 ? 216 : 144;
};

struct WgmmaArgs {
  Nf4Weight weight;
  const void* bias;
  const void* residual;
  void* out;
  const char* tiles;  // tiled activations
  bool begins;        // no launch tiles the activations in front of this one, whose beginning is then the GEMM's
  float4* partial;    // partial sums of split tiles
  int* counters;      // of the partial sums that are there, of every tile and warpgroup
  int m, n;
  int k_blocks;     // k / 64
  int scale_shift;  // log2(blocksize / 64)
  int steps;        // k steps (256 k) of a tile
  int token_tiles;
  int block_steps, longer_blocks;  // k steps of a thread block; the first longer_blocks have one more
  int first_extra;                 // k steps that the first thread block of a split tile has beyond that
  bool own_scales;                 // each 64 k of a row have a scale of their own
  bool wide_scales;                // and those of a row and k step (nested ones: of four k steps) are 16 aligned bytes
  uint64_t* clock;
  Gate gate;
  // Where k blocks lie in the groups of 256 nested scales, which in a shard are the whole weight's: the first k block of all,
  // and how far one row's lie behind those of the row before.
  int place_first, place_pitch;

  // The weight's row behind a row of the tiles, in which gates and ups alternate where the epilogue gates.
  template <bool kGates>
  __device__ __forceinline__ int weight_row(int row) const {
    return kGates ? row / 2 + row % 2 * gate.columns : row;
  }
};

}  // namespace nf4
