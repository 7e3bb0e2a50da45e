// One-shot all-reduce of small tensors over the GPUs of a host: out = residual + sum over the ranks of their x.
//
// A rank writes its x into all other ranks' IPC buffers (ipc_buffer.cuh), waits for theirs in its own, and adds up: one way
// over NVLink, and no barrier. What is written carries its epoch, in NCCL's LL or LL128 protocol (all_reduce_ll.cuh,
// all_reduce_ll128.cuh). Sums are float32, in the order of the ranks, and rounded once: all ranks get the same bits, whatever
// the timing.
#include <stdint.h>

#include "all_reduce_ll.cuh"
#include "all_reduce_ll128.cuh"
#include "device.cuh"

namespace nf4 {
namespace {

template <typename T, int kMaxRanks>
cudaError_t launch(const ReduceArgs& args, bool ll128, void* stream) {
  int of_block = ll128 ? kBlockWarps * kWarpChunks : kReduceThreads;
  dim3 grid(static_cast<unsigned>((args.chunks + of_block - 1) / of_block));
  auto* kernel = ll128 ? all_reduce_ll128<T, kMaxRanks> : all_reduce_ll<T, kMaxRanks>;
  return launch_kernel(kernel, {grid, kReduceThreads}, stream, args);
}

template <typename T>
cudaError_t launch(const ReduceArgs& args, bool ll128, void* stream) {
  if (args.ranks <= 2) return launch<T, 2>(args, ll128, stream);
  if (args.ranks <= 4) return launch<T, 4>(args, ll128, stream);
  return launch<T, NF4_MAX_RANKS>(args, ll128, stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue for what one launch does not take.
NF4_EXPORT int nf4_cuda_all_reduce(const Nf4AllReduce* reduce) {
  int64_t size = reduce->dtype == NF4_FLOAT32 ? 4 : 2, bytes = reduce->count * size;
  int ranks = reduce->ranks;
  bool ll128 = reduce->ll128 != 0;
  if (bytes == 0) return cudaSuccess;
  if (ranks < 2 || ranks > NF4_MAX_RANKS || reduce->rank < 0 || reduce->rank >= ranks) return cudaErrorInvalidValue;
  int64_t most = ll128 ? nf4::max_ll128_bytes(ranks) : nf4::max_ll_bytes(ranks);
  if (bytes < 0 || bytes % nf4::kChunk != 0 || bytes > most) return cudaErrorInvalidValue;
  nf4::ReduceArgs args{};
  args.x = static_cast<const uint4*>(reduce->x);
  args.residual = static_cast<const uint4*>(reduce->residual);
  args.out = static_cast<uint4*>(reduce->out);
  for (int rank = 0; rank < ranks; ++rank) args.buffers[rank] = static_cast<char*>(reduce->buffers[rank]);
  args.chunks = static_cast<int>(bytes / nf4::kChunk);
  args.rank = reduce->rank;
  args.ranks = ranks;
  args.fatal = reduce->fatal != 0;
  switch (reduce->dtype) {
    case NF4_FLOAT32: return nf4::launch<float>(args, ll128, reduce->stream);
    case NF4_FLOAT16: return nf4::launch<__half>(args, ll128, reduce->stream);
    case NF4_BFLOAT16: return nf4::launch<__nv_bfloat16>(args, ll128, reduce->stream);
    default: return cudaErrorInvalidValue;
  }
}
