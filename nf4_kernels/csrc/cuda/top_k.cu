// The k greatest of each row of up to 1024 values, in descending order: what a router of experts asks for. A warp has a row in
// registers and takes the greatest k times; torch's selection and sort are two launches that cost several times as much.
#include <stdint.h>

#include "common.cuh"
#include "pipeline.cuh"

namespace nf4 {
namespace {

constexpr int kWarps = 4;  // rows of a thread block

struct TopKArgs {
  const void* x;  // [rows][width]
  void* values;   // [rows][k]
  int64_t* indices;
  int64_t rows;
  int width, k;
};

__device__ __forceinline__ float to_float(float value) { return value; }

// An unsigned number that orders values as torch does: NaN is the greatest, and both zeros are equal. It is never 0.
__device__ __forceinline__ unsigned rank_of(float value) {
  unsigned bits = __float_as_uint(value + 0.0f);
  if (value != value) return ~0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Equal values come in the order of their indices. kPer: values of a lane, at lane, lane + 32, ...
template <typename T, int kPer>
__global__ void __launch_bounds__(kWarps * 32) top_k(const __grid_constant__ TopKArgs args) {
#if __CUDA_ARCH__ >= 800
  launch_dependents();
  grid_dependency_wait();
  int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (row >= args.rows) return;
  const T* x = static_cast<const T*>(args.x) + row * args.width;
  unsigned ranks[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    int at = lane + i * 32;
    // This is no __ldg, since the kernel in front may write x after this one has started.
    ranks[i] = at < args.width ? rank_of(to_float(x[at])) : 0;
  }
  for (int j = 0; j < args.k; ++j) {
    unsigned own = 0, at = lane;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (ranks[i] > own) own = ranks[i], at = lane + i * 32;
    }
    unsigned most = __reduce_max_sync(~0u, own);
    unsigned found = __reduce_min_sync(~0u, own == most ? at : ~0u);
    if (lane == 0) {
      static_cast<T*>(args.values)[row * args.k + j] = x[found];
      args.indices[row * args.k + j] = found;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lane + i * 32 == static_cast<int>(found)) ranks[i] = 0;
    }
  }
#endif
}

template <typename T, int kPer>
cudaError_t launch(const TopKArgs& args, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((args.rows + kWarps - 1) / kWarps));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  config.attrs = &attribute;
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, top_k<T, kPer>, args);
}

template <typename T>
cudaError_t launch(const TopKArgs& args, cudaStream_t stream) {
  if (args.width <= 64) return launch<T, 2>(args, stream);
  if (args.width <= 128) return launch<T, 4>(args, stream);
  if (args.width <= 256) return launch<T, 8>(args, stream);
  return launch<T, 32>(args, stream);
}

}  // namespace
}  // namespace nf4

// values and indices [rows, k] of x [rows, width] of dtype, dense. Returns a cudaError_t, cudaErrorInvalidValue for a
// width beyond 1024 or a k outside of 1 ... width.
NF4_EXPORT int nf4_cuda_top_k(const void* x, void* values, int64_t* indices, int64_t rows, int32_t width, int32_t k,
                              int32_t dtype, void* stream) {
  if (width < 1 || width > 1024 || k < 1 || k > width || rows < 1 || rows > 1 << 30) return cudaErrorInvalidValue;
  nf4::TopKArgs args{x, values, indices, rows, width, k};
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (dtype == NF4_FLOAT32) return nf4::launch<float>(args, on);
  return dtype == NF4_FLOAT16 ? nf4::launch<__half>(args, on) : nf4::launch<__nv_bfloat16>(args, on);
}
