// Tensor maps of weights, for copies in boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace nf4 {

// Describes bytes to the copy engine: sizes of all dimensions, the innermost first, pitches in bytes of all but that, and the
// box of a copy, which lands swizzled in lines of 128 bytes. False where the driver cannot make the map.
inline bool encode_swizzled(const void* bytes, int dimensions, const cuuint64_t* sizes, const cuuint64_t* pitches,
                            const cuuint32_t* box, CUtensorMap* map) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // The runtime hands out the driver's function, so that nothing is linked against the driver.
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  cuuint32_t strides[5] = {1, 1, 1, 1, 1};
  return encode && encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(dimensions),
                          const_cast<void*>(bytes), sizes, pitches, box, strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace nf4
