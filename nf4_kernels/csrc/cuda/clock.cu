// The device clock's own launches. They mark the end of work that is not ours, measure what a launch takes behind its last
// instruction, and add up the times that launches left.
#include "clock.cuh"
#include "common.cuh"
#include "device.cuh"
#include "pipeline.cuh"

namespace nf4 {
namespace {

constexpr int kThreads = 256;

__global__ void stamp(uint64_t* clock) { clock_end(clock); }

// Runs for `lasting` nanoseconds and leaves its times as the GEMMs do. followed: the next launch may start beside it.
__global__ void __launch_bounds__(kThreads) work(uint64_t* clock, float* written, unsigned lasting, bool followed) {
  if (followed) launch_dependents();
  grid_dependency_wait();
  unsigned long long began = device_time();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(clock);
  while (device_time() - began < lasting) continue;
  written[blockIdx.x * kThreads + threadIdx.x] = static_cast<float>(blockIdx.x);
  if (threadIdx.x == 0) clock_end(clock);
}

cudaError_t launch_work(uint64_t* clock, float* written, int blocks, unsigned lasting, bool followed,
                        cudaStream_t stream) {
  return launch_kernel(work, {blocks, kThreads}, stream, clock, written, lasting, followed);
}

// Adds what the launches of each kind left to the kind's totals and clears it, for the next launches that leave it there.
__global__ void __launch_bounds__(kThreads) collect(Nf4Clocks clocks, unsigned long long* totals) {
  __shared__ unsigned long long warps[kThreads / 32];
  for (int kind = 0; kind < NF4_CLOCK_KINDS; ++kind) {
    uint64_t* words = clocks.first[kind];
    unsigned long long sums[NF4_CLOCK_TOTALS] = {};  // all, timed decoding's, decoding
    for (int i = threadIdx.x; i < clocks.count[kind]; i += kThreads) {
      uint64_t* times = words + int64_t{i} * NF4_CLOCK_WORDS;
      uint64_t began = times[kBegan], ended = times[kEnded], decoded = times[kDecoded];
      times[kBegan] = times[kEnded] = times[kDecoded] = 0;
      if (began == 0 || ended <= began) continue;
      uint64_t took = ended - began + clocks.completion[kind];
      sums[0] += took;
      if (decoded) {
        sums[1] += took;
        sums[2] += decoded;
      }
    }
    for (int i = 0; i < NF4_CLOCK_TOTALS; ++i) {
      unsigned long long sum = sums[i];
      for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / 32; ++warp) sum += warps[warp];
        totals[kind * NF4_CLOCK_TOTALS + i] += sum;
      }
      __syncthreads();
    }
  }
}

}  // namespace
}  // namespace nf4

// Marks the end of a launch's time once everything before it on the stream has ended; returns a cudaError_t.
NF4_EXPORT int nf4_cuda_clock_end(uint64_t* clock, void* stream) {
  nf4::stamp<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(clock);
  return cudaGetLastError();
}

// Two launches that leave their times in clocks, NF4_CLOCK_WORDS words each: one of `blocks` blocks, and one that waits on
// the device until that one has ended. written: 256 floats a block. From capability 9.0 on; returns a cudaError_t.
NF4_EXPORT int nf4_cuda_clock_completion(uint64_t* clocks, float* written, int32_t blocks, void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  // The first one lasts until the second has been launched.
  cudaError_t status = nf4::launch_work(clocks, written, blocks, 30000, true, s);
  if (status == cudaSuccess) status = nf4::launch_work(clocks + NF4_CLOCK_WORDS, written, 1, 0, false, s);
  return status;
}

// totals: for each kind NF4_CLOCK_TOTALS sums in nanoseconds, to which this adds. Returns a cudaError_t.
NF4_EXPORT int nf4_cuda_clock_collect(const Nf4Clocks* clocks, uint64_t* totals, void* stream) {
  nf4::collect<<<1, nf4::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *clocks, reinterpret_cast<unsigned long long*>(totals));
  return cudaGetLastError();
}
