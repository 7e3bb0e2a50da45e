// What all launches that sum over ranks share: waiting for data, and the sums of it.
#pragma once
#include <stdint.h>

#include "ipc_buffer.cuh"

namespace nf4 {

constexpr int kPollsBetweenLooks = 256;  // looks at the clock

struct ReduceArgs {
  const uint4* x;
  const uint4* residual;
  uint4* out;
  char* buffers[NF4_MAX_RANKS];
  int chunks, rank, ranks;
  bool fatal;
};

__device__ __forceinline__ void store_pair(char* to, uint64_t low, uint64_t high) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ void load_pair(const char* from, uint64_t& low, uint64_t& high) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The epoch after this one. Memory is zeros at first, so no epoch is 0; the largest one is followed by one of the other
// slot.
__device__ __forceinline__ unsigned next_epoch(unsigned epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

// Counts polls of a rank's data, and records the rank once they have gone on for longer than the timeout.
class Timeout {
 public:
  __device__ explicit Timeout(IpcBufferHeader* header) : header_(header) {}

  __device__ __forceinline__ bool ends(int rank, bool fatal) {
    if (++polls_ % kPollsBetweenLooks) return false;
    uint64_t now = now_ns();
    if (began_ == 0) began_ = now;
    if (now - began_ < load_fresh(&header_->timeout_ns)) return false;
    header_->hung_rank = rank;
    __threadfence_system();
    if (fatal) __trap();
    return true;
  }

 private:
  IpcBufferHeader* header_;
  uint64_t began_ = 0;
  int polls_ = 0;
};

// Adds the values of one register of T to sums.
template <typename T>
__device__ __forceinline__ void add(float* sums, unsigned data) {
  if constexpr (sizeof(T) == 4) {
    sums[0] += __uint_as_float(data);
  } else {
    float2 pair = unpack2<T>(data);
    sums[0] += pair.x;
    sums[1] += pair.y;
  }
}

template <typename T>
__device__ __forceinline__ unsigned rounded(const float* sums) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(sums[0]);
  } else {
    return pack2<T>(sums[0], sums[1]);
  }
}

// The sum of a chunk: the residual, which may be zeros, and then the ranks' data in their order.
template <typename T, int kMaxRanks>
__device__ __forceinline__ uint4 sum_of(uint4 residual, bool has_residual, const uint4* data, int ranks) {
  constexpr int kValues = 4 / sizeof(T);  // in a register
  float sums[4 * kValues] = {};
  auto add_chunk = [&](uint4 chunk) {
    add<T>(sums, chunk.x);
    add<T>(sums + kValues, chunk.y);
    add<T>(sums + 2 * kValues, chunk.z);
    add<T>(sums + 3 * kValues, chunk.w);
  };
  if (has_residual) add_chunk(residual);
#pragma unroll
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (rank < ranks) add_chunk(data[rank]);
  }
  return make_uint4(rounded<T>(sums), rounded<T>(sums + kValues), rounded<T>(sums + 2 * kValues),
                    rounded<T>(sums + 3 * kValues));
}

}  // namespace nf4
