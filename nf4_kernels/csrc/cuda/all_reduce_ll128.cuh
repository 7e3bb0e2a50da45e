// The all-reduce with NCCL's LL128 protocol: of every 128 bytes written 120 are data, and the last 8 are the epoch. 128 aligned
// bytes that a warp stores with one instruction arrive together over NVLink, though not over PCIe.
//
// A warp has two stores of 4 lines of 128 bytes each, and 60 chunks of data in them: lane l has chunk l of the first 32, and
// but for every eighth lane one of the 28 behind them. An eighth lane's 16 bytes of a line are 8 of its chunk and the epoch;
// the other 8 of its chunk are in its line of the second store.
#pragma once
#include "all_reduce.cuh"
#include "pipeline.cuh"

namespace nf4 {

constexpr int kLines = 4;                    // of 128 bytes, which a warp's store has
constexpr int kStoreBytes = kLines * 128;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint64_t low_half(uint4 data) { return uint64_t{data.y} << 32 | data.x; }
__device__ __forceinline__ uint64_t high_half(uint4 data) { return uint64_t{data.w} << 32 | data.z; }
__device__ __forceinline__ uint4 of_halves(uint64_t low, uint64_t high) {
  return make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high),
                    static_cast<unsigned>(high >> 32));
}

// A lane's two chunks of data; the second one is nothing for lanes that end a line.
struct Chunks {
  uint4 first, second;
};

__device__ __forceinline__ void send_lines(char* to, Chunks data, bool ends_line, unsigned epoch) {
  uint64_t flag = epoch;
  uint64_t second_low = ends_line ? high_half(data.first) : low_half(data.second);
  store_pair(to, low_half(data.first), ends_line ? flag : high_half(data.first));
  store_pair(to + kStoreBytes, second_low, ends_line ? flag : high_half(data.second));
}

// Whether all lines of this epoch have arrived; then the lanes' chunks are in data. All lanes of a warp call it.
//
// A line arrives as a whole, but the lanes need not read it as a whole: the lane with the epoch may have read it after it
// arrived, and another one its part before. So data are what lanes read once the epochs are there (NCCL does the same).
__device__ __forceinline__ bool receive_lines(const char* from, Chunks& data, bool ends_line, unsigned epoch) {
  uint64_t a, b, c, d;
  load_pair(from, a, b);
  load_pair(from + kStoreBytes, c, d);
  if (__any_sync(kAllLanes, ends_line && (b != epoch || d != epoch))) return false;
  load_pair(from, a, b);
  load_pair(from + kStoreBytes, c, d);
  data.first = of_halves(a, ends_line ? c : b);
  data.second = of_halves(c, d);
  return true;
}

template <typename T, int kMaxRanks>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_ll128(const __grid_constant__ ReduceArgs args) {
  grid_dependency_wait();
  launch_dependents();
  char* own = args.buffers[args.rank];
  IpcBufferHeader* header = reinterpret_cast<IpcBufferHeader*>(own);
  unsigned epoch = next_epoch(load_fresh(&header->epochs[blockIdx.x]));
  int warp = (blockIdx.x * kReduceThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (warp * kWarpChunks < args.chunks) {
    bool ends_line = lane % 8 == 7;
    int first = warp * kWarpChunks + lane, second = first + 32 - lane / 8;
    bool has_first = first < args.chunks, has_second = !ends_line && second < args.chunks;
    auto load = [&](const uint4* from) {
      uint4 none = make_uint4(0, 0, 0, 0);
      return Chunks{has_first ? load_fresh(from + first) : none, has_second ? load_fresh(from + second) : none};
    };
    auto place = [&](int rank) {
      return ll128_place(args.ranks, epoch & 1, rank) + int64_t{warp} * 2 * kStoreBytes + lane * kChunk;
    };
    Chunks data[kMaxRanks];
    Chunks mine = load(args.x);
    unsigned missing = 0;
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      data[rank] = mine;
      if (rank >= args.ranks || rank == args.rank) continue;
      send_lines(args.buffers[rank] + place(args.rank), mine, ends_line, epoch);
      missing |= 1u << rank;
    }
    Chunks residual = args.residual ? load(args.residual) : Chunks{};
    Timeout timeout(header);
    while (missing) {
#pragma unroll
      for (int rank = 0; rank < kMaxRanks; ++rank) {
        if ((missing >> rank & 1) && receive_lines(own + place(rank), data[rank], ends_line, epoch)) {
          missing &= ~(1u << rank);
        }
      }
      if (missing && __any_sync(kAllLanes, timeout.ends(__ffs(missing) - 1, args.fatal))) break;
    }
    uint4 of_ranks[kMaxRanks];
    auto sum = [&](uint4 added, uint4 Chunks::* chunk) {
#pragma unroll
      for (int rank = 0; rank < kMaxRanks; ++rank) of_ranks[rank] = data[rank].*chunk;
      return sum_of<T, kMaxRanks>(added, args.residual, of_ranks, args.ranks);
    };
    if (has_first) args.out[first] = sum(residual.first, &Chunks::first);
    if (has_second) args.out[second] = sum(residual.second, &Chunks::second);
  }
  __syncthreads();
  if (threadIdx.x == 0) header->epochs[blockIdx.x] = epoch;
}

}  // namespace nf4
