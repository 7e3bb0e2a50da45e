// A rank's inbox: memory of its GPU into which the other ranks of the host write through peer pointers (CUDA IPC).
//
// Behind a header it has two slots, which launches use alternately: a rank that writes epoch e + 2 has finished e + 1, which
// the others wrote after they had finished e, and with it the reading of that slot. A thread block has the same bytes of the
// inbox in launches of all sizes, and counts its epochs there, so launches can be captured in CUDA graphs.
#pragma once
#include <stdint.h>

#include "common.cuh"

namespace nf4 {

constexpr int kChunk = 16;  // bytes of x that a thread has
constexpr int kReduceThreads = 128, kReduceBlocks = 1024;
static_assert(kReduceThreads * kReduceBlocks * kChunk == NF4_ALL_REDUCE_BYTES, "params.h says how much one launch takes");

struct InboxHeader {
  uint32_t epochs[kReduceBlocks];  // of the last launch of each thread block
  uint64_t patience_ns;
  int32_t silent_rank;  // -1, or a rank for which a launch has waited too long
};
constexpr int64_t kInboxData = 8192;
static_assert(sizeof(InboxHeader) <= kInboxData, "data is behind the header");

// The most bytes that one launch takes; they depend on the number of ranks, since what a rank sends grows with it.
__host__ __device__ constexpr int64_t most_reduced_bytes(int ranks) {
  return NF4_ALL_REDUCE_BYTES / (ranks <= 2 ? 1 : ranks <= 4 ? 2 : 4);
}

// Where in an inbox a rank's data begins; slot is an epoch's lowest bit. Every 4 bytes have an epoch of 4 beside them.
__host__ __device__ constexpr int64_t inbox_place(int ranks, int slot, int rank) {
  return kInboxData + (int64_t{slot} * ranks + rank) * 2 * most_reduced_bytes(ranks);
}

__host__ __device__ constexpr int64_t inbox_bytes(int ranks) { return inbox_place(ranks, 2, 0); }

}  // namespace nf4
