// A rank's IPC buffer: memory of its GPU into which the other ranks of the host write through peer pointers (CUDA IPC).
//
// Behind a header it has two slots, which launches use alternately: a rank that writes epoch e + 2 has finished e + 1, which
// the others wrote after they had finished e, and with it the reading of that slot. A thread block has the same bytes of the
// buffer in launches of all sizes, and counts its epochs there, so launches can be captured in CUDA graphs.
#pragma once
#include <stdint.h>

#include "common.cuh"

namespace nf4 {

constexpr int kChunk = 16;  // bytes of x that a thread has at a time
constexpr int kReduceThreads = 128, kBlockWarps = kReduceThreads / 32;
constexpr int kWarpChunks = 60;  // of a warp in the LL128 protocol, which are 960 of 1024 bytes
// A GPU does not hold 2048 of these blocks at a time. No launch waits for ever if GPUs start blocks in the order of their index,
// as they do: a block sends before it waits, so the lowest block that has not ended on both GPUs gets what it waits for.
constexpr int kLLBlocks = 1024, kLL128Blocks = 2048;
static_assert(kReduceThreads * kLLBlocks * kChunk == NF4_ALL_REDUCE_LL_BYTES, "params.h says how much one launch takes");
static_assert(kBlockWarps * kWarpChunks * kLL128Blocks * kChunk == NF4_ALL_REDUCE_LL128_BYTES, "as well");

struct IpcBufferHeader {
  uint32_t epochs[kLL128Blocks];  // of the last launch of each thread block
  uint64_t timeout_ns;
  int32_t hung_rank;  // -1, or a rank for which a launch has waited too long
};
constexpr int64_t kIpcBufferData = 16384;
static_assert(sizeof(IpcBufferHeader) <= kIpcBufferData, "data is behind the header");

// What is divided among more ranks, since what a rank sends grows with their number.
__host__ __device__ constexpr int64_t share_of(int64_t bytes, int ranks) {
  return bytes / (ranks <= 2 ? 1 : ranks <= 4 ? 2 : 4);
}

// The most bytes that one launch takes.
__host__ __device__ constexpr int64_t max_ll_bytes(int ranks) { return share_of(NF4_ALL_REDUCE_LL_BYTES, ranks); }
__host__ __device__ constexpr int64_t max_ll128_bytes(int ranks) { return share_of(NF4_ALL_REDUCE_LL128_BYTES, ranks); }

// Where in an IPC buffer a rank's data begins; slot is an epoch's lowest bit. Every 4 bytes have an epoch of 4 beside them.
__host__ __device__ constexpr int64_t ll_place(int ranks, int slot, int rank) {
  return kIpcBufferData + (int64_t{slot} * ranks + rank) * 2 * max_ll_bytes(ranks);
}

// As ll_place. The protocols have slots of their own, because what is data in one is an epoch in the other. 15 of 16 bytes are
// data.
__host__ __device__ constexpr int64_t ll128_place(int ranks, int slot, int rank) {
  return ll_place(ranks, 2, 0) + (int64_t{slot} * ranks + rank) * (max_ll128_bytes(ranks) / 15 * 16);
}

__host__ __device__ constexpr int64_t ipc_buffer_bytes(int ranks, bool ll128) {
  return ll128 ? ll128_place(ranks, 2, 0) : ll_place(ranks, 2, 0);
}

}  // namespace nf4
