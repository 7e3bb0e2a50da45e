// A router of experts: softmax, selection of the k greatest of each row of up to 1024, and their weights. A warp has a row in
// registers and takes the greatest k times; torch's selection and sort are two launches that cost several times as much, and its
// softmax and weights are one each.
#include <stdint.h>

#include "device.cuh"
#include "pipeline.cuh"
#include "router.cuh"

namespace nf4 {
namespace {

constexpr int kWarps = 4;  // rows of a thread block

struct RouteArgs {
  const void* logits;  // [rows][width]
  Routes routes;
  int64_t rows;
  int width;
};

// kPer: logits of a lane, at lane, lane + 32, ...
template <typename T, int kPer>
__global__ void __launch_bounds__(kWarps * 32) route(const __grid_constant__ RouteArgs args) {
#if __CUDA_ARCH__ >= 800
  launch_dependents();
  grid_dependency_wait();
  int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= args.rows) return;
  const T* from = static_cast<const T*>(args.logits) + row * args.width;
  float logits[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    int at = threadIdx.x % 32 + i * 32;
    // This is no __ldg, since the kernel in front may write the logits after this one has started.
    logits[i] = at < args.width ? to_float(from[at]) : 0.0f;
  }
  route_row<kPer>(args.routes, row, args.width, logits);
#endif
}

// Launches one warp for each row.
cudaError_t launch(void (*kernel)(RouteArgs), const RouteArgs& args, void* stream) {
  unsigned blocks = static_cast<unsigned>((args.rows + kWarps - 1) / kWarps);
  return launch_kernel(kernel, {dim3(blocks), kWarps * 32}, stream, args);
}

template <typename T>
cudaError_t launch_route(const RouteArgs& args, void* stream) {
  if (args.width <= 64) return launch(route<T, 2>, args, stream);
  if (args.width <= 128) return launch(route<T, 4>, args, stream);
  if (args.width <= 256) return launch(route<T, 8>, args, stream);
  return launch(route<T, 32>, args, stream);
}

}  // namespace
}  // namespace nf4

// weights and experts [rows, k]: the k greatest of each row of softmax(logits), for logits [rows, width] of dtype, dense. With
// `normalised` a row's weights are divided by their sum; they are rounded to `rounded`. Returns a cudaError_t,
// cudaErrorInvalidValue for a width beyond 1024 or a k outside of 1 ... width or beyond 32.
NF4_EXPORT int nf4_cuda_route(const void* logits, float* weights, int32_t* experts, int64_t rows, int32_t width, int32_t k,
                              int32_t dtype, int32_t normalised, int32_t rounded, void* stream) {
  if (width < 1 || width > 1024 || k < 1 || k > width || k > 32 || rows < 1 || rows > 1 << 30) return cudaErrorInvalidValue;
  nf4::RouteArgs args{logits, {weights, experts, k, normalised != 0, rounded}, rows, width};
  if (dtype == NF4_FLOAT32) return nf4::launch_route<float>(args, stream);
  return dtype == NF4_FLOAT16 ? nf4::launch_route<__half>(args, stream) : nf4::launch_route<__nv_bfloat16>(args, stream);
}
