// What a launch asks of the device that it runs on. Host code.
#pragma once

#include <cuda_runtime.h>

namespace nf4 {

// An attribute of the current device; -1 if it cannot be read.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return -1;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : -1;
}

// Whether the system keeps some of a block's shared memory for itself, in front of the block's own.
inline bool reserves_shared_memory() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

// Whether launches may use what sm_90 brought: programmatic dependent launch, clusters. NF4_POSED builds have code of an
// older GPU in them, whose kernels do not wait for the kernel in front.
inline bool has_hopper_launches() {
#ifdef NF4_POSED
  return false;
#else
  return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
#endif
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared = 0;         // bytes of dynamic shared memory
  int cluster = 0;        // thread blocks of a cluster, from sm_90 on; 0: no clusters, in which their instructions are illegal
  bool dependent = true;  // whether, from sm_90 on, it may start before the one in front has ended
};

template <typename... Parameters, typename... Values>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream, Values&&... values) {
  // With what is static a thread block has 48 KB unasked.
  cudaError_t status = shape.shared > 32 * 1024
                           ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared)
                           : cudaSuccess;
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = shape.dependent;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = !has_hopper_launches() ? 0 : shape.cluster ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(values)...);
}

}  // namespace nf4
