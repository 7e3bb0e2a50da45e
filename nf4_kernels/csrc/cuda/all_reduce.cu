// One-shot all-reduce of small tensors over the GPUs of a host: out = residual + sum over the ranks of their x.
//
// Each rank has an inbox, into which the others write through peer pointers (CUDA IPC). A rank writes its x into all other
// inboxes, waits for theirs in its own, and adds up: one way over NVLink, and no barrier. Every 8 bytes written are 4 of data
// and 4 of the epoch (NCCL's LL protocol): 8 aligned bytes arrive together, so whoever reads an epoch has its data. Sums
// are float32, in the order of the ranks, and rounded once: all ranks get the same bits, whatever the timing.
//
// Epochs are counted in the inbox by each thread block for itself, so launches can be captured in CUDA graphs; a thread block
// has the same bytes of the inbox in launches of all sizes. There are two slots, used alternately: a rank that writes epoch
// e + 2 has finished e + 1, which the others wrote after they had finished e, and with it the reading of that slot.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common.cuh"
#include "pipeline.cuh"

namespace nf4 {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 128;
constexpr int kChunk = 16;  // bytes of x that a thread has
constexpr int64_t kMostBytes = int64_t{kThreads} * kBlocks * kChunk;
static_assert(kMostBytes == NF4_ALL_REDUCE_BYTES, "params.h says how much one launch takes");
constexpr int kPollsBetweenLooks = 256;  // at the time

// The beginning of an inbox; behind it the slots: [2][ranks][chunks][2 * kChunk bytes].
struct Inbox {
  uint32_t epochs[kBlocks];  // of the last launch of each thread block
  uint64_t patience_ns;
  int32_t silent_rank;  // -1, or a rank for which a launch has waited too long
};
constexpr int kSlots = 1024;
static_assert(sizeof(Inbox) <= kSlots, "slots are behind the rest");

__host__ __device__ constexpr int64_t slot_bytes(int ranks) { return 2 * kMostBytes * ranks; }

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

template <typename T, int kMostRanks>
__global__ void __launch_bounds__(kThreads) all_reduce(const __grid_constant__ Args args) {
  grid_dependency_wait();
  launch_dependents();
  constexpr int kValues = 4 / sizeof(T);  // of a register
  char* own = args.inboxes[args.rank];
  Inbox* inbox = reinterpret_cast<Inbox*>(own);
  // Memory is zeros at first, so no epoch is 0; after the last one comes one of the other slot.
  unsigned epoch = load_fresh(&inbox->epochs[blockIdx.x]) + 1;
  if (epoch == 0) epoch = 2;
  int chunk = blockIdx.x * kThreads + threadIdx.x;
  if (chunk < args.chunks) {
    int64_t slot = kSlots + (epoch & 1) * slot_bytes(args.ranks);
    auto place = [&](int rank) { return slot + rank * 2 * kMostBytes + int64_t{chunk} * 2 * kChunk; };
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
    uint64_t began = 0;
    for (int polls = 1; missing; ++polls) {
#pragma unroll
      for (int rank = 0; rank < kMostRanks; ++rank) {
        if ((missing >> rank & 1) && receive(own + place(rank), data[rank], epoch)) missing &= ~(1u << rank);
      }
      if (!missing || polls % kPollsBetweenLooks) continue;
      uint64_t now = now_ns();
      if (began == 0) began = now;
      if (now - began < load_fresh(&inbox->patience_ns)) continue;
      inbox->silent_rank = __ffs(missing) - 1;
      __threadfence_system();
      if (args.fatal) __trap();
      break;
    }
    float sums[4 * kValues] = {};
    if (args.residual) {
      add<T>(sums, residual.x);
      add<T>(sums + kValues, residual.y);
      add<T>(sums + 2 * kValues, residual.z);
      add<T>(sums + 3 * kValues, residual.w);
    }
#pragma unroll
    for (int rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= args.ranks) continue;
      add<T>(sums, data[rank].x);
      add<T>(sums + kValues, data[rank].y);
      add<T>(sums + 2 * kValues, data[rank].z);
      add<T>(sums + 3 * kValues, data[rank].w);
    }
    args.out[chunk] = make_uint4(rounded<T>(sums), rounded<T>(sums + kValues), rounded<T>(sums + 2 * kValues),
                                 rounded<T>(sums + 3 * kValues));
  }
  __syncthreads();
  if (threadIdx.x == 0) inbox->epochs[blockIdx.x] = epoch;
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
  config.gridDim = dim3(static_cast<unsigned>((args.chunks + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
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

// An inbox of this rank on the current device, and the handle (64 bytes) with which other processes open it.
NF4_EXPORT int nf4_cuda_inbox_create(int32_t ranks, void** inbox, char* handle) {
  if (ranks < 2 || ranks > NF4_MOST_RANKS) return cudaErrorInvalidValue;
  size_t bytes = nf4::kSlots + 2 * nf4::slot_bytes(ranks);
  cudaError_t status = cudaMalloc(inbox, bytes);
  if (status != cudaSuccess) return status;
  cudaIpcMemHandle_t made;
  nf4::Inbox empty{};
  empty.silent_rank = -1;
  empty.patience_ns = UINT64_MAX;
  status = cudaMemset(*inbox, 0, bytes);
  if (status == cudaSuccess) status = cudaMemcpy(*inbox, &empty, sizeof(empty), cudaMemcpyHostToDevice);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status == cudaSuccess) status = cudaIpcGetMemHandle(&made, *inbox);
  if (status != cudaSuccess) {
    cudaFree(*inbox);
    return status;
  }
  static_assert(sizeof(made) == NF4_INBOX_HANDLE_BYTES, "");
  memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}

NF4_EXPORT int nf4_cuda_inbox_free(void* inbox) { return cudaFree(inbox); }

// Another process's inbox, as this process's current device reaches it.
NF4_EXPORT int nf4_cuda_inbox_open(const char* handle, void** inbox) {
  cudaIpcMemHandle_t given;
  memcpy(&given, handle, sizeof(given));
  cudaError_t status = cudaIpcOpenMemHandle(inbox, given, cudaIpcMemLazyEnablePeerAccess);
  // What is returned is said; nobody else is to find it as the last error.
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

NF4_EXPORT int nf4_cuda_inbox_close(void* inbox) { return cudaIpcCloseMemHandle(inbox); }

// How long launches that begin from here on wait for a rank. Not while a graph is captured.
NF4_EXPORT int nf4_cuda_inbox_patience(void* inbox, uint64_t ns) {
  return cudaMemcpy(static_cast<char*>(inbox) + offsetof(nf4::Inbox, patience_ns), &ns, sizeof(ns),
                    cudaMemcpyHostToDevice);
}

// A rank for which a launch has waited too long, or -1. Waits for the launches that are under way.
NF4_EXPORT int nf4_cuda_inbox_silent_rank(void* inbox, int32_t* rank) {
  return cudaMemcpy(rank, static_cast<char*>(inbox) + offsetof(nf4::Inbox, silent_rank), sizeof(*rank),
                    cudaMemcpyDeviceToHost);
}

// Launches; returns a cudaError_t, cudaErrorInvalidValue for what one launch does not take.
NF4_EXPORT int nf4_cuda_all_reduce(const Nf4AllReduce* reduce) {
  int64_t size = reduce->dtype == NF4_FLOAT32 ? 4 : 2, bytes = reduce->count * size;
  if (bytes == 0) return cudaSuccess;
  bool fits = bytes > 0 && bytes % nf4::kChunk == 0 && bytes <= nf4::kMostBytes;
  if (!fits || reduce->ranks < 2 || reduce->ranks > NF4_MOST_RANKS || reduce->rank < 0 ||
      reduce->rank >= reduce->ranks) {
    return cudaErrorInvalidValue;
  }
  nf4::Args args{};
  args.x = static_cast<const uint4*>(reduce->x);
  args.residual = static_cast<const uint4*>(reduce->residual);
  args.out = static_cast<uint4*>(reduce->out);
  for (int rank = 0; rank < reduce->ranks; ++rank) args.inboxes[rank] = static_cast<char*>(reduce->inboxes[rank]);
  args.chunks = static_cast<int>(bytes / nf4::kChunk);
  args.rank = reduce->rank;
  args.ranks = reduce->ranks;
  args.fatal = reduce->fatal != 0;
  cudaStream_t stream = static_cast<cudaStream_t>(reduce->stream);
  switch (reduce->dtype) {
    case NF4_FLOAT32: return nf4::launch<float>(args, stream);
    case NF4_FLOAT16: return nf4::launch<__half>(args, stream);
    case NF4_BFLOAT16: return nf4::launch<__nv_bfloat16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}
