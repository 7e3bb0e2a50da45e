// The launch that the kernels of split tiles share.
#pragma once

#include <cuda_runtime.h>

namespace nf4 {

// waits: thread blocks wait for one another, so all of them must run at the same time.
template <typename Args>
cudaError_t launch_blocks(void (*kernel)(Args), const Args& args, int grid, int threads, int shared, bool waits,
                          cudaStream_t stream) {
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = waits;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace nf4
