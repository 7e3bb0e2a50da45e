// launch_moe_instance() of instances.cuh, which each file beside this one defines for some instances.
#pragma once

#include "../instances.cuh"
#include "../kernel.cuh"

#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SCALE_ON, PING_PONG)                               \
  template cudaError_t                                                                                        \
  launch_moe_instance<WgmmaInstance<TOKENS, GROUPS, STAGES, TOKEN_STAGES, ScaleOn::SCALE_ON, PING_PONG>>( \
      const Nf4Moe&, const MoeWgmmaArgs&, const CUtensorMap&, int);

namespace nf4 {

template <typename Instance>
cudaError_t launch_moe_instance(const Nf4Moe& moe, const MoeWgmmaArgs& args, const CUtensorMap& map, int grid) {
  bool nested = moe.weight.absmax_8bit != nullptr, gates = moe.activation != NF4_NO_ACTIVATION;
#define NF4_LAUNCH(T, NESTED, GATES)                                                                              \
  if (nested == NESTED && gates == GATES) {                                                                       \
    using Traits = WgmmaTraits<T, Instance, NESTED, GATES>;                                                       \
    LaunchShape shape{grid, Traits::kThreads, WgmmaLayout<Traits>::kTotal};                                       \
    return launch_kernel(moe_wgmma<Traits>, shape, moe.stream, args, map);                                        \
  }
#define NF4_LAUNCH_ALL(T)    \
  NF4_LAUNCH(T, false, false) \
  NF4_LAUNCH(T, false, true)  \
  NF4_LAUNCH(T, true, false)  \
  NF4_LAUNCH(T, true, true)
#ifndef NF4_BF16_ONLY
  if (moe.dtype == NF4_FLOAT16) {
    NF4_LAUNCH_ALL(__half)
  }
#endif
  NF4_LAUNCH_ALL(__nv_bfloat16)
#undef NF4_LAUNCH_ALL
#undef NF4_LAUNCH
  return cudaErrorInvalidValue;
}

}  // namespace nf4
