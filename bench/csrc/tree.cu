// A yardstick for comparison, not a kernel to use: dequantization as bitsandbytes 0.47.0 did it, by the description in
// arXiv 2604.02556: a tree of four comparisons a code, 64 threads a block, 8 bytes a thread in one-byte steps. Only the
// benchmark calls it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 64;
constexpr int kBytesPerThread = 8;

__device__ float tree(unsigned code) {
  if (code & 8) {
    if (code & 4) {
      if (code & 2) return code & 1 ? 1.0f : 0.7229568362236023f;
      return code & 1 ? 0.5626170039176941f : 0.44070982933044434f;
    }
    if (code & 2) return code & 1 ? 0.33791524171829224f : 0.24611230194568634f;
    return code & 1 ? 0.16093020141124725f : 0.07958029955625534f;
  }
  if (code & 4) {
    if (code & 2) return code & 1 ? 0.0f : -0.09105003625154495f;
    return code & 1 ? -0.18477343022823334f : -0.28444138169288635f;
  }
  if (code & 2) return code & 1 ? -0.39491748809814453f : -0.5250730514526367f;
  return code & 1 ? -0.6961928009986877f : -1.0f;
}

__global__ void __launch_bounds__(kThreads)
    dequantize_tree(const uint8_t* packed, const float* absmax, int shift, int64_t bytes, __nv_bfloat162* out) {
  int64_t start = int64_t{blockIdx.x} * kThreads * kBytesPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kBytesPerThread; ++i) {
    int64_t at = start + i * kThreads;
    if (at >= bytes) return;
    float scale = __ldg(absmax + ((2 * at) >> shift));
    unsigned byte = packed[at];
    out[at] = __floats2bfloat162_rn(tree(byte >> 4) * scale, tree(byte & 15) * scale);
  }
}

}  // namespace

// An even number of elements of a weight with plain scales, one for each blocksize (a power of two), to bfloat16.
extern "C" int nf4_bench_dequantize_tree(const uint8_t* packed, const float* absmax, int64_t blocksize, int64_t count,
                                         void* out, void* stream) {
  if (blocksize < 2 || blocksize & (blocksize - 1) || count % 2) return cudaErrorInvalidValue;
  int shift = 0;
  while (blocksize >> (shift + 1)) ++shift;
  int64_t bytes = count / 2, per_block = kThreads * kBytesPerThread;
  dequantize_tree<<<static_cast<unsigned>((bytes + per_block - 1) / per_block), kThreads, 0,
                    static_cast<cudaStream_t>(stream)>>>(packed, absmax, shift, bytes,
                                                         static_cast<__nv_bfloat162*>(out));
  return cudaGetLastError();
}
