// The device clock's own launches: the end of work that is not ours, and the sums of what launches left.
#include "clock.cuh"
#include "common.cuh"

namespace nf4 {
namespace {

constexpr int kThreads = 256;

__global__ void stamp(uint64_t* clock) { clock_end(clock); }

// Adds end - start of each pair to the kind's total and clears it, for the next launch that leaves its times there.
__global__ void __launch_bounds__(kThreads) collect(Nf4Clocks clocks, unsigned long long* totals) {
  __shared__ unsigned long long warps[kThreads / 32];
  for (int kind = 0; kind < NF4_CLOCK_KINDS; ++kind) {
    ulonglong2* pairs = reinterpret_cast<ulonglong2*>(clocks.first[kind]);
    unsigned long long sum = 0;
    for (int i = threadIdx.x; i < clocks.count[kind]; i += kThreads) {
      ulonglong2 times = pairs[i];
      if (times.y > times.x && times.x > 0) sum += times.y - times.x;
      pairs[i] = make_ulonglong2(0, 0);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kThreads / 32; ++warp) sum += warps[warp];
      totals[kind] += sum;
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace nf4

// Marks the end of a launch's time once everything before it on the stream has ended; returns a cudaError_t.
NF4_EXPORT int nf4_cuda_clock_end(uint64_t* clock, void* stream) {
  nf4::stamp<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(clock);
  return cudaGetLastError();
}

// totals: NF4_CLOCK_KINDS sums in nanoseconds, added to; returns a cudaError_t.
NF4_EXPORT int nf4_cuda_clock_collect(const Nf4Clocks* clocks, uint64_t* totals, void* stream) {
  nf4::collect<<<1, nf4::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *clocks, reinterpret_cast<unsigned long long*>(totals));
  return cudaGetLastError();
}
