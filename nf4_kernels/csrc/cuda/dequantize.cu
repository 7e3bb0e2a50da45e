// NF4 to float32, float16 or bfloat16: one launch, also for nested scales. Bit for bit what bitsandbytes gives.
//
// The kernel of arXiv 2604.02556: the 16 codes lie in 64 bytes of shared memory, one bank each, so that any 32 lookups
// of a warp need one pass (equal codes are broadcast, different codes lie in different banks).
// A warp's step reads 128 contiguous bytes and writes 512 (16-bit types); a thread's reads of all its steps are issued
// before the first is used.
#include "clock.cuh"
#include "common.cuh"

namespace nf4 {
namespace {

#ifndef NF4_DEQUANTIZE_STEPS
#define NF4_DEQUANTIZE_STEPS 4
#endif
#ifndef NF4_DEQUANTIZE_THREADS
#define NF4_DEQUANTIZE_THREADS 256
#endif
constexpr int kThreads = NF4_DEQUANTIZE_THREADS;
constexpr int kSteps = NF4_DEQUANTIZE_STEPS;
constexpr int kPerStep = 8;  // weights of one thread and step: 4 bytes in
constexpr int kMinBlocksize = 32;
constexpr int64_t kPerBlock = int64_t{kThreads} * kSteps * kPerStep;
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kThreadsPerSm = 1536;
#else
constexpr int kThreadsPerSm = 2048;
#endif

struct Scales {
  const float* absmax;
  const uint8_t* absmax_8bit;
  const float* code;
  const float* offset;
  int offset_stride;
  int shift;  // log2 of the blocksize

  template <bool kNested>
  __device__ __forceinline__ float at(int64_t block) const {
    if constexpr (!kNested) return __ldg(absmax + block);
    return of_group(block, static_cast<unsigned>(block >> 8));  // 2^32 groups are 32 TiB of weights
  }
  __device__ __forceinline__ float of_group(int64_t block, unsigned group) const {
    return nested_scale(__ldg(code + __ldg(absmax_8bit + block)), __ldg(absmax + group),
                        __ldg(offset + group * offset_stride));
  }
};

// Nested scales of a shard, which has the whole weight's groups. They are a type of their own, since the division and its
// registers would cost whole weights something.
struct ShardScales : Scales {
  unsigned row_blocks, group_offset, group_skip;

  ShardScales(const Scales& scales, const Nf4Weight& w)
      : Scales(scales),
        row_blocks(w.group_skip ? static_cast<unsigned>(w.k / w.blocksize) : 1),
        group_offset(w.group_offset),
        group_skip(w.group_skip) {}

  template <bool kNested>
  __device__ __forceinline__ float at(int64_t block) const {
    static_assert(kNested, "plain scales have no groups");
    unsigned own = static_cast<unsigned>(block);  // 2^32 blocks are 128 GiB of weights
    int64_t place = int64_t{own} + group_offset + int64_t{own / row_blocks} * group_skip;
    return of_group(block, static_cast<unsigned>(place >> 8));
  }
};

__device__ __forceinline__ void store8(float* out, const float (&v)[8]) {
  __stcs(reinterpret_cast<float4*>(out), make_float4(v[0], v[1], v[2], v[3]));
  __stcs(reinterpret_cast<float4*>(out) + 1, make_float4(v[4], v[5], v[6], v[7]));
}

template <typename T>
__device__ __forceinline__ void store8(T* out, const float (&v)[8]) {
  __stcs(reinterpret_cast<uint4*>(out), make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                                                   pack2<T>(v[6], v[7])));
}

// The first thread block begins the launch. Any of the last ones, as many as the device holds at a time, may end it.
struct DequantizeClocks {
  uint64_t* own;
  uint64_t* whole;
  __device__ __forceinline__ void start() const {
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    clock_start(own);
    clock_start(whole);
  }
  __device__ __forceinline__ void end() const {
    constexpr unsigned kMostResident = 2048;
    if (threadIdx.x == 0 && blockIdx.x + kMostResident >= gridDim.x) clock_end(own);
  }
};

// Elements [first, first + count) of the flattened weight into out[0, count). first is a multiple of 8.
// Nested scales take three dependent loads, so the thread block decodes each of its scales once, while the weights are on
// their way.
// The second bound keeps as many blocks on an SM as the reads under way need: one register more costs a block.
template <typename T, bool kNested, typename SomeScales>
__global__ void __launch_bounds__(kThreads, (kNested ? 1536 : kThreadsPerSm) / kThreads)
    dequantize(const uint8_t* __restrict__ packed, SomeScales scales, int64_t first, int64_t count,
               T* __restrict__ out, DequantizeClocks clocks) {
  clocks.start();
  constexpr int kMaxScales = static_cast<int>(kPerBlock / kMinBlocksize) + 1;
  __shared__ float table[16];
  __shared__ float decoded[kNested ? kMaxScales : 1];
  if (threadIdx.x < 16) table[threadIdx.x] = kCodebook[threadIdx.x];
  int64_t block_start = blockIdx.x * kPerBlock, start = block_start + threadIdx.x * kPerStep;
  int64_t scale_start = (first + block_start) >> scales.shift;
  unsigned bytes[kSteps];
  float scale[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    int64_t i = start + int64_t{s} * kThreads * kPerStep;
    if (i + kPerStep <= count) {
      bytes[s] = __ldcs(reinterpret_cast<const unsigned*>(packed + ((first + i) >> 1)));
      if constexpr (!kNested) scale[s] = scales.template at<false>((first + i) >> scales.shift);
    }
  }
  if (kNested) {
    int64_t last = min(block_start + kPerBlock, count) - 1;
    int decoding = static_cast<int>(((first + last) >> scales.shift) - scale_start) + 1;
    for (int i = threadIdx.x; i < decoding; i += kThreads) decoded[i] = scales.template at<true>(scale_start + i);
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    int64_t i = start + int64_t{s} * kThreads * kPerStep;
    if (i + kPerStep <= count) {
      if (kNested) scale[s] = decoded[((first + i) >> scales.shift) - scale_start];
      float v[8];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        v[2 * b] = __fmul_rn(table[(bytes[s] >> (8 * b + 4)) & 15], scale[s]);
        v[2 * b + 1] = __fmul_rn(table[(bytes[s] >> (8 * b)) & 15], scale[s]);
      }
      store8(out + i, v);
    } else {
      for (int64_t e = i; e < count; ++e) {
        unsigned byte = packed[(first + e) >> 1];
        float code = table[((first + e) & 1) ? (byte & 15) : (byte >> 4)];
        out[e] = from_float<T>(__fmul_rn(code, scales.template at<kNested>((first + e) >> scales.shift)));
      }
    }
  }
  clocks.end();
}

// The same one element a thread, for pointers without the alignment that wide accesses need.
template <typename T, bool kNested, typename SomeScales>
__global__ void __launch_bounds__(kThreads)
    dequantize_unaligned(const uint8_t* __restrict__ packed, SomeScales scales, int64_t first, int64_t count,
                         T* __restrict__ out, DequantizeClocks clocks) {
  clocks.start();
  int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= count) return;
  unsigned byte = packed[(first + e) >> 1];
  float code = kCodebook[((first + e) & 1) ? (byte & 15) : (byte >> 4)];
  out[e] = from_float<T>(__fmul_rn(code, scales.template at<kNested>((first + e) >> scales.shift)));
  clocks.end();
}

template <typename T, bool kNested, typename SomeScales>
void launch(const uint8_t* packed, const SomeScales& scales, int64_t first, int64_t count, void* out,
            DequantizeClocks clocks, cudaStream_t stream) {
  T* target = static_cast<T*>(out);
  bool aligned = reinterpret_cast<uintptr_t>(packed) % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  if (aligned && first % kPerStep == 0) {
    unsigned grid = static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
    dequantize<T, kNested><<<grid, kThreads, 0, stream>>>(packed, scales, first, count, target, clocks);
  } else {
    unsigned grid = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    dequantize_unaligned<T, kNested><<<grid, kThreads, 0, stream>>>(packed, scales, first, count, target, clocks);
  }
}

template <typename T>
void launch(const Nf4Weight& w, int64_t first, int64_t count, void* out, DequantizeClocks clocks, cudaStream_t stream) {
  Scales scales{w.absmax, w.absmax_8bit, w.absmax_code, w.absmax_offset, w.offset_stride, log2_of(w.blocksize)};
  if (!w.absmax_8bit) {
    launch<T, false>(w.packed, scales, first, count, out, clocks, stream);
  } else if (w.group_offset || w.group_skip) {
    launch<T, true>(w.packed, ShardScales(scales, w), first, count, out, clocks, stream);
  } else {
    launch<T, true>(w.packed, scales, first, count, out, clocks, stream);
  }
}

}  // namespace
}  // namespace nf4

// Dequantizes count elements from element `first` of the flattened weight; returns a cudaError_t. clock: null, or where
// the launch leaves its times; whole: null, or the words of the GEMM that begins with it.
NF4_EXPORT int nf4_cuda_dequantize(const Nf4Weight* weight, int64_t first, int64_t count, void* out, int32_t dtype,
                                   void* stream, uint64_t* clock, uint64_t* whole) {
  if (count <= 0) return cudaSuccess;
  nf4::DequantizeClocks clocks{clock, whole};
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case NF4_FLOAT32: nf4::launch<float>(*weight, first, count, out, clocks, s); break;
    case NF4_FLOAT16: nf4::launch<__half>(*weight, first, count, out, clocks, s); break;
    case NF4_BFLOAT16: nf4::launch<__nv_bfloat16>(*weight, first, count, out, clocks, s); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
