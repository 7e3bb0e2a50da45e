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

}  // namespace nf4
