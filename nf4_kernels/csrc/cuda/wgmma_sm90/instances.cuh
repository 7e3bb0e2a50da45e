// The instances of linear_wgmma.cuh, in tables that are compiled side by side (launches/).
#pragma once

#include "traits.cuh"

// NF4_INSTANCE(tokens of a tile, consumer warpgroups, stages of weights, stages of tokens, what is scaled, ping-pong); each
// with its reason. nf4_kernels/plan/wgmma.py lists the same tokens and warpgroups, docs/lab/gemm-129-1024.md the measurements.
#define NF4_WGMMA_INSTANCES_UP_TO_32                                                                            \
  /* first stages are smaller than with three warpgroups: small weights start 1.7 us earlier */                 \
  NF4_INSTANCE(16, 2, 5, 5, kDoubleBufferedSums, false)                                                         \
  /* large weights have rows for all SMs anyway, and each token tile is loaded for more of them */              \
  NF4_INSTANCE(16, 3, 4, 5, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 2; token stages are twice as large, so one fewer fits */                                           \
  NF4_INSTANCE(32, 2, 5, 4, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 3; three token stages are what fits */                                                             \
  NF4_INSTANCE(32, 3, 4, 3, kDoubleBufferedSums, false)

#define NF4_WGMMA_INSTANCES_UP_TO_64                                                                            \
  /* as 64 x 2 */                                                                                               \
  NF4_INSTANCE(48, 2, 4, 6, kDoubleBufferedSums, false)                                                         \
  /* as 64 x 3 */                                                                                               \
  NF4_INSTANCE(48, 3, 4, 4, kSums, false)                                                                       \
  /* as 16 x 2; five stages of weights and four of tokens were no faster */                                     \
  NF4_INSTANCE(64, 2, 4, 5, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 3; 144 registers a thread hold one buffer of sums, not two */                                      \
  NF4_INSTANCE(64, 3, 4, 3, kSums, false)

#define NF4_WGMMA_INSTANCES_UP_TO_112                                                                           \
  /* as 128 x 2; smaller token stages, so more fit, here and below */                                           \
  NF4_INSTANCE(80, 2, 4, 8, kSums, true)                                                                        \
  /* as 64 x 3 */                                                                                               \
  NF4_INSTANCE(80, 3, 4, 5, kSums, false)                                                                       \
  /* two buffers are 1 to 3 % faster than ping-pong */                                                          \
  NF4_INSTANCE(96, 2, 4, 7, kDoubleBufferedSums, false)                                                         \
  NF4_INSTANCE(112, 2, 4, 6, kSums, true)

#define NF4_WGMMA_INSTANCES_UP_TO_136                                                                           \
  /* there are registers for one buffer; ping-pong decodes meanwhile, 2 to 3 % faster */                        \
  NF4_INSTANCE(128, 2, 4, 5, kSums, true)                                                                       \
  /* there are no registers for a buffer beside the tile's sums; as many token stages as fit, here and below */ \
  NF4_INSTANCE(136, 2, 3, 6, kWeights, false)

#define NF4_WGMMA_INSTANCES_UP_TO_160           \
  NF4_INSTANCE(144, 2, 3, 5, kWeights, false) \
  NF4_INSTANCE(152, 2, 3, 5, kWeights, false) \
  NF4_INSTANCE(160, 2, 3, 5, kWeights, false)

// Where the room that token stages leave is enough, there is one more stage of weights.
#define NF4_WGMMA_INSTANCES_UP_TO_200           \
  NF4_INSTANCE(176, 2, 4, 4, kWeights, false) \
  NF4_INSTANCE(192, 2, 3, 4, kWeights, false) \
  NF4_INSTANCE(200, 2, 3, 4, kWeights, false)

#define NF4_WGMMA_INSTANCES_UP_TO_224           \
  NF4_INSTANCE(208, 2, 3, 4, kWeights, false) \
  NF4_INSTANCE(216, 2, 4, 3, kWeights, false) \
  NF4_INSTANCE(224, 2, 4, 3, kWeights, false)

#define NF4_WGMMA_INSTANCES_UP_TO_256           \
  NF4_INSTANCE(232, 2, 4, 3, kWeights, false) \
  NF4_INSTANCE(240, 2, 3, 3, kWeights, false) \
  NF4_INSTANCE(256, 2, 3, 3, kWeights, false)

#define NF4_WGMMA_INSTANCES     \
  NF4_WGMMA_INSTANCES_UP_TO_32  \
  NF4_WGMMA_INSTANCES_UP_TO_64  \
  NF4_WGMMA_INSTANCES_UP_TO_112 \
  NF4_WGMMA_INSTANCES_UP_TO_136 \
  NF4_WGMMA_INSTANCES_UP_TO_160 \
  NF4_WGMMA_INSTANCES_UP_TO_200 \
  NF4_WGMMA_INSTANCES_UP_TO_224 \
  NF4_WGMMA_INSTANCES_UP_TO_256
