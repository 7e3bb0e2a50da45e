// What the library tells about itself: CUDA's message for an error, and the sizes of the structs it is called with.
#include "common.cuh"
#include "struct_sizes.h"

NF4_EXPORT const char* nf4_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Bytes of a struct of params.h; 0 for a name that is none of theirs.
NF4_EXPORT int64_t nf4_cuda_struct_size(const char* name) { return nf4::struct_size(name); }
