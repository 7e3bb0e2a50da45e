// launch_instance() of launch.cuh, which each file beside this one defines for some instances.
#pragma once

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

// A launch whose kernel may start before the one in front has ended where `dependent` (programmatic dependent launch).
class LaunchConfig {
 public:
  LaunchConfig(dim3 grid, int threads, int shared_bytes, void* stream, bool dependent) {
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = grid;
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = &attribute_;
    config_.numAttrs = dependent ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attribute_{};
  cudaLaunchConfig_t config_{};
};

// Launches what tiles the activations. Where the weight may be read at once, it and linear_wgmma, which reads the weight,
// may both start before the kernel in front has ended.
template <typename T>
cudaError_t launch_tiling(const Nf4Linear& linear, const WgmmaSizes& sizes, int tokens) {
  const T* x = static_cast<const T*>(linear.x);
  uint4* tiles = static_cast<uint4*>(linear.workspace);
  int m = static_cast<int>(linear.m), k_blocks = static_cast<int>(linear.weight.k / 64);
  int padded_blocks = static_cast<int>(sizes.steps * 4);
  if (linear.norm_weight) {
    dim3 grid(static_cast<unsigned>(sizes.token_tiles * tokens));
    LaunchConfig config(grid, kNormThreads, 0, linear.stream, linear.constant_weights);
    return cudaLaunchKernelEx(config.get(), normalise_and_tile_activations<T>, x,
                              static_cast<const T*>(linear.norm_weight), linear.norm_eps, tiles, m, k_blocks,
                              padded_blocks, tokens, linear.clock);
  }
  int64_t chunks = sizes.tile_bytes / 16;
  LaunchConfig config(dim3(static_cast<unsigned>(ceil_div(chunks, 256))), 256, 0, linear.stream,
                      linear.constant_weights);
  return cudaLaunchKernelEx(config.get(), tile_activations<T>, x, tiles, m, k_blocks, padded_blocks, tokens,
                            static_cast<int>(chunks), linear.clock);
}

template <typename Traits, bool kTimed>
cudaError_t launch_kernels(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                           const CUtensorMap& map) {
  auto* kernel = linear_wgmma<Traits, kTimed>;
  constexpr int kShared = WgmmaLayout<Traits>::kTotal;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  if (!linear.tiles) status = launch_tiling<typename Traits::T>(linear, sizes, Traits::kTokens);
  if (status != cudaSuccess) return status;
  // Behind the launch that tiles the activations it may always start early: where weights are not constant, that one began
  // behind the kernel that wrote them.
  LaunchConfig config(dim3(static_cast<unsigned>(sizes.blocks), static_cast<unsigned>(sizes.lines)), Traits::kThreads,
                      kShared, linear.stream, !linear.tiles || linear.constant_weights);
  return cudaLaunchKernelEx(config.get(), kernel, args, map);
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
