// One-shot all-reduce of small tensors over the GPUs of a host: out = residual + sum over the ranks of their x.
//
// A rank writes its x into all other ranks' inboxes (inbox.cuh), waits for theirs in its own, and adds up: one way over
// NVLink, and no barrier. Every 8 bytes written are 4 of data and 4 of the epoch (NCCL's LL protocol): 8 aligned bytes arrive
// together, so whoever reads an epoch has its data. Sums are float32, in the order of the ranks, and rounded once: all ranks
// get the same bits, whatever the timing.
#include <stdint.h>

#include "inbox.cuh"
#include "pipeline.cuh"

namespace nf4 {
namespace {

constexpr int kPollsBetweenLooks = 256;  // looks at the clock

struct Args {
  const uint4* x;
  const uint4* residual;
  uint4* out;
  char* inboxes[NF4_MOST_RANKS];
  int chunks, rank, ranks;
  bool fatal;
};

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void store_pair(char* to, uint64_t low, uint64_t high) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ void load_pair(const char* from, uint64_t& low, uint64_t& high) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

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

// The epoch after this one. Memory is zeros at first, so no epoch is 0; the largest one is followed by one of the other
// slot.
__device__ __forceinline__ unsigned next_epoch(unsigned epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

// Counts polls of a rank's data, and records the rank once they have gone on for longer than the patience.
class Patience {
 public:
  __device__ explicit Patience(InboxHeader* header) : header_(header) {}

  __device__ __forceinline__ bool ends(int rank, bool fatal) {
    if (++polls_ % kPollsBetweenLooks) return false;
    uint64_t now = now_ns();
    if (began_ == 0) began_ = now;
    if (now - began_ < load_fresh(&header_->patience_ns)) return false;
    header_->silent_rank = rank;
    __threadfence_system();
    if (fatal) __trap();
    return true;
  }

 private:
  InboxHeader* header_;
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
template <typename T, int kMostRanks>
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
  for (int rank = 0; rank < kMostRanks; ++rank) {
    if (rank < ranks) add_chunk(data[rank]);
  }
  return make_uint4(rounded<T>(sums), rounded<T>(sums + kValues), rounded<T>(sums + 2 * kValues),
                    rounded<T>(sums + 3 * kValues));
}

template <typename T, int kMostRanks>
__global__ void __launch_bounds__(kReduceThreads) all_reduce(const __grid_constant__ Args args) {
  grid_dependency_wait();
  launch_dependents();
  char* own = args.inboxes[args.rank];
  InboxHeader* header = reinterpret_cast<InboxHeader*>(own);
  unsigned epoch = next_epoch(load_fresh(&header->epochs[blockIdx.x]));
  int chunk = blockIdx.x * kReduceThreads + threadIdx.x;
  if (chunk < args.chunks) {
    auto place = [&](int rank) { return inbox_place(args.ranks, epoch & 1, rank) + int64_t{chunk} * 2 * kChunk; };
    uint4 data[kMostRanks];
    uint4 mine = load_fresh(args.x + chunk);
    unsigned missing = 0;
#pragma unroll
    for (int rank = 0; rank < kMostRanks; ++rank) {
      data[rank] = mine;
      if (rank >= args.ranks || rank == args.rank) continue;
      send(args.inboxes[rank] + place(args.rank), mine, epoch);
      missing |= 1u << rank;
    }
    uint4 residual = args.residual ? load_fresh(args.residual + chunk) : make_uint4(0, 0, 0, 0);
    Patience patience(header);
    while (missing) {
#pragma unroll
      for (int rank = 0; rank < kMostRanks; ++rank) {
        if ((missing >> rank & 1) && receive(own + place(rank), data[rank], epoch)) missing &= ~(1u << rank);
      }
      if (missing && patience.ends(__ffs(missing) - 1, args.fatal)) break;
    }
    args.out[chunk] = sum_of<T, kMostRanks>(residual, args.residual, data, args.ranks);
  }
  __syncthreads();
  if (threadIdx.x == 0) header->epochs[blockIdx.x] = epoch;
}

template <typename T, int kMostRanks>
cudaError_t launch(const Args& args, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((args.chunks + kReduceThreads - 1) / kReduceThreads));
  config.blockDim = dim3(kReduceThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, all_reduce<T, kMostRanks>, args);
}

template <typename T>
cudaError_t launch(const Args& args, cudaStream_t stream) {
  if (args.ranks <= 2) return launch<T, 2>(args, stream);
  if (args.ranks <= 4) return launch<T, 4>(args, stream);
  return launch<T, NF4_MOST_RANKS>(args, stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue for what one launch does not take.
NF4_EXPORT int nf4_cuda_all_reduce(const Nf4AllReduce* reduce) {
  int64_t size = reduce->dtype == NF4_FLOAT32 ? 4 : 2, bytes = reduce->count * size;
  int ranks = reduce->ranks;
  if (bytes == 0) return cudaSuccess;
  if (ranks < 2 || ranks > NF4_MOST_RANKS || reduce->rank < 0 || reduce->rank >= ranks) return cudaErrorInvalidValue;
  if (bytes < 0 || bytes % nf4::kChunk != 0 || bytes > nf4::most_reduced_bytes(ranks)) return cudaErrorInvalidValue;
  nf4::Args args{};
  args.x = static_cast<const uint4*>(reduce->x);
  args.residual = static_cast<const uint4*>(reduce->residual);
  args.out = static_cast<uint4*>(reduce->out);
  for (int rank = 0; rank < ranks; ++rank) args.inboxes[rank] = static_cast<char*>(reduce->inboxes[rank]);
  args.chunks = static_cast<int>(bytes / nf4::kChunk);
  args.rank = reduce->rank;
  args.ranks = ranks;
  args.fatal = reduce->fatal != 0;
  cudaStream_t stream = static_cast<cudaStream_t>(reduce->stream);
  switch (reduce->dtype) {
    case NF4_FLOAT32: return nf4::launch<float>(args, stream);
    case NF4_FLOAT16: return nf4::launch<__half>(args, stream);
    case NF4_BFLOAT16: return nf4::launch<__nv_bfloat16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}
