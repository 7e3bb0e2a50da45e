// Launches of decode.cuh's kernel.
#include "../device.cuh"
#include "decode.cuh"

namespace nf4 {
namespace attention {
namespace {

template <typename T, int kWarps, int kStages>
cudaError_t launch(const Nf4DecodeAttention& args) {
  constexpr int kRing = kWarps * kStages * static_cast<int>(kStageBytes);
  static_assert(sizeof(Shared<kWarps>) <= kRing);
  int all = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  int reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  if (all < 0 || reserved < 0) return cudaErrorNotSupported;
  // A multiprocessor that ran more than per_processor thread blocks would leave fewer for others, because the launch fills
  // each one as the launch in front leaves it. So a block asks for so much shared memory that there is no room for one more.
  int bytes = max(kRing, all / (args.per_processor + 1) - reserved + 16);
  dim3 grid(static_cast<unsigned>(args.item_count), static_cast<unsigned>(args.kv_heads));
  return launch_kernel(attend<T, kWarps, kStages>, {grid, kWarps * 32, bytes}, args.stream, args);
}

template <typename T>
cudaError_t launch_instance(const Nf4DecodeAttention& args) {
#define NF4_INSTANCE(WARPS, STAGES) \
  if (args.warps == WARPS && args.stages == STAGES) return launch<T, WARPS, STAGES>(args)
  NF4_INSTANCE(8, 2);
  NF4_INSTANCE(4, 2);
  NF4_INSTANCE(2, 3);
  NF4_INSTANCE(1, 3);
  NF4_INSTANCE(1, 2);
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace attention
}  // namespace nf4

// Returns a cudaError_t, cudaErrorInvalidValue for more than 8 query heads of a key head, another dtype, or warps and stages
// that are no instance's.
NF4_EXPORT int nf4_cuda_decode_attention(const Nf4DecodeAttention* args) {
  if (args->group < 1 || args->group > nf4::attention::kHeads || args->item_count < 1) return cudaErrorInvalidValue;
  if (args->dtype == NF4_FLOAT16) return nf4::attention::launch_instance<__half>(*args);
  return args->dtype == NF4_BFLOAT16 ? nf4::attention::launch_instance<__nv_bfloat16>(*args) : cudaErrorInvalidValue;
}
