// What the library tells about itself: whether it has code for a GPU, CUDA's message for an error, and the sizes of the
// structs it is called with.
#include "common.cuh"
#include "struct_sizes.h"

namespace nf4 {
namespace {

__global__ void nothing() {}

}  // namespace
}  // namespace nf4

// cudaErrorNoKernelImageForDevice where the library was compiled for other GPUs than the current one.
NF4_EXPORT int nf4_cuda_has_code() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, nf4::nothing);
  cudaGetLastError();  // or the next launch would report it
  return status;
}

NF4_EXPORT const char* nf4_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Bytes of a struct of params.h; 0 for a name that is none of theirs.
NF4_EXPORT int64_t nf4_cuda_struct_size(const char* name) { return nf4::struct_size(name); }
