// launch_instance() of launch.cuh, which each file beside this one defines for some instances.
#pragma once

#include "../../device.cuh"
#include "../launch.cuh"
#include "../linear_wgmma.cuh"

// The files whose names end in _timed compile the others again, for the kernels that time their decoding: of bfloat16, and
// none of these gates.
#ifndef NF4_TIMED
#define NF4_TIMED false
#endif

#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SCALE_ON, PING_PONG)                                  \
  template cudaError_t                                                                                           \
  launch_instance<WgmmaInstance<TOKENS, GROUPS, STAGES, TOKEN_STAGES, ScaleOn::SCALE_ON, PING_PONG>, NF4_TIMED>( \
      const Nf4Linear&, const WgmmaSizes&, const WgmmaArgs&, const CUtensorMap&);

namespace nf4 {
namespace {

// Launches what tiles the activations. Where the weight may be read at once, it and linear_wgmma, which reads the weight,
// may both start before the kernel in front has ended.
template <typename T>
cudaError_t launch_tiling(const Nf4Linear& linear, const WgmmaSizes& sizes, int tokens) {
  const T* x = static_cast<const T*>(linear.x);
  uint4* tiles = static_cast<uint4*>(linear.workspace);
  int m = static_cast<int>(linear.m), k_blocks = static_cast<int>(linear.weight.k / 64);
  int padded_blocks = static_cast<int>(sizes.steps * 4);
  bool dependent = linear.constant_weights;
  if (linear.norm_weight) {
    dim3 grid(static_cast<unsigned>(sizes.token_tiles * tokens));
    return launch_kernel(normalise_and_tile_activations<T>, {grid, kNormThreads, 0, 0, dependent}, linear.stream, x,
                         static_cast<const T*>(linear.norm_weight), linear.norm_eps, tiles, m, k_blocks, padded_blocks,
                         tokens, linear.clock);
  }
  int64_t chunks = sizes.tile_bytes / 16;
  dim3 grid(static_cast<unsigned>(ceil_div(chunks, 256)));
  return launch_kernel(tile_activations<T>, {grid, 256, 0, 0, dependent}, linear.stream, x, tiles, m, k_blocks,
                       padded_blocks, tokens, static_cast<int>(chunks), linear.clock);
}

template <typename Traits, bool kTimed>
cudaError_t launch_kernels(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                           const CUtensorMap& map) {
  cudaError_t status = cudaSuccess;
  if (!linear.tiles) status = launch_tiling<typename Traits::T>(linear, sizes, Traits::kTokens);
  if (status != cudaSuccess) return status;
  // Behind the launch that tiles the activations it may always start early: where weights are not constant, that one began
  // behind the kernel that wrote them.
  LaunchShape shape{dim3(static_cast<unsigned>(sizes.blocks), static_cast<unsigned>(sizes.lines)), Traits::kThreads,
                    WgmmaLayout<Traits>::kTotal, 0, !linear.tiles || linear.constant_weights};
  return launch_kernel(linear_wgmma<Traits, kTimed>, shape, linear.stream, args, map);
}

}  // namespace

template <typename Instance, bool kTimed>
cudaError_t launch_instance(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                            const CUtensorMap& map) {
  bool nested = linear.weight.absmax_8bit != nullptr;
#define NF4_LAUNCH(T, GATES)                                                                              \
  return nested ? launch_kernels<WgmmaTraits<T, Instance, true, GATES>, kTimed>(linear, sizes, args, map) \
                : launch_kernels<WgmmaTraits<T, Instance, false, GATES>, kTimed>(linear, sizes, args, map)
  if constexpr (!kTimed) {
    if (args.gate.columns) NF4_LAUNCH(__nv_bfloat16, true);
#ifndef NF4_BF16_ONLY
    if (linear.dtype == NF4_FLOAT16) NF4_LAUNCH(__half, false);
#endif
  }
  if (args.gate.columns || linear.dtype == NF4_FLOAT16) return cudaErrorInvalidValue;
  NF4_LAUNCH(__nv_bfloat16, false);
#undef NF4_LAUNCH
}

}  // namespace nf4
