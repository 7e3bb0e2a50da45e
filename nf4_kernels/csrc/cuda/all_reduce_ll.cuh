// The all-reduce with NCCL's LL protocol: every 8 bytes written are 4 of data and 4 of the epoch. 8 aligned bytes arrive
// together over NVLink and PCIe alike, so whoever reads an epoch has its data.
#pragma once
#include "all_reduce.cuh"
#include "pipeline.cuh"

namespace nf4 {

__device__ __forceinline__ uint64_t with_epoch(unsigned data, unsigned epoch) {
  return uint64_t{epoch} << 32 | data;
}

__device__ __forceinline__ void send(char* to, uint4 data, unsigned epoch) {
  store_pair(to, with_epoch(data.x, epoch), with_epoch(data.y, epoch));
  store_pair(to + kChunk, with_epoch(data.z, epoch), with_epoch(data.w, epoch));
}

// Whether a chunk of this epoch has arrived; then it is in data.
__device__ __forceinline__ bool receive(const char* from, uint4& data, unsigned epoch) {
  uint64_t a, b, c, d;
  load_pair(from, a, b);
  load_pair(from + kChunk, c, d);
  auto is_new = [epoch](uint64_t pair) { return static_cast<unsigned>(pair >> 32) == epoch; };
  if (!is_new(a) || !is_new(b) || !is_new(c) || !is_new(d)) return false;
  data = make_uint4(static_cast<unsigned>(a), static_cast<unsigned>(b), static_cast<unsigned>(c),
                    static_cast<unsigned>(d));
  return true;
}

template <typename T, int kMaxRanks>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_ll(const __grid_constant__ ReduceArgs args) {
  grid_dependency_wait();
  launch_dependents();
  char* own = args.buffers[args.rank];
  IpcBufferHeader* header = reinterpret_cast<IpcBufferHeader*>(own);
  unsigned epoch = next_epoch(load_fresh(&header->epochs[blockIdx.x]));
  int chunk = blockIdx.x * kReduceThreads + threadIdx.x;
  if (chunk < args.chunks) {
    auto place = [&](int rank) { return ll_place(args.ranks, epoch & 1, rank) + int64_t{chunk} * 2 * kChunk; };
    uint4 data[kMaxRanks];
    uint4 mine = load_fresh(args.x + chunk);
    unsigned missing = 0;
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      data[rank] = mine;
      if (rank >= args.ranks || rank == args.rank) continue;
      send(args.buffers[rank] + place(args.rank), mine, epoch);
      missing |= 1u << rank;
    }
    uint4 residual = args.residual ? load_fresh(args.residual + chunk) : make_uint4(0, 0, 0, 0);
    Timeout timeout(header);
    while (missing) {
#pragma unroll
      for (int rank = 0; rank < kMaxRanks; ++rank) {
        if ((missing >> rank & 1) && receive(own + place(rank), data[rank], epoch)) missing &= ~(1u << rank);
      }
      if (missing && timeout.ends(__ffs(missing) - 1, args.fatal)) break;
    }
    args.out[chunk] = sum_of<T, kMaxRanks>(residual, args.residual, data, args.ranks);
  }
  __syncthreads();
  if (threadIdx.x == 0) header->epochs[blockIdx.x] = epoch;
}

}  // namespace nf4
