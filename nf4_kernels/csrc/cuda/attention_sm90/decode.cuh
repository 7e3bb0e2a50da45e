// Decode attention: each sequence's newest token attends to its keys in the paged cache, and its key and value are written
// there. A thread block takes a part of a sequence's keys (an item) and one key head, with all query heads that share it.
// Its warps take KV blocks in turn, each through a ring of its own, with a softmax of its own: no warp waits for another one
// before the last key.
#pragma once

#include "results.cuh"

namespace nf4 {
namespace attention {

// What the host laid out for a thread block (server/engine/runtime/attention/kernels/decode/attention.py, layout()).
struct Item {
  int row, begin, end, newest, first, parts, blocks, before;
};

__device__ __forceinline__ Item load_item(const int32_t* items, int item) {
  const int4* from = reinterpret_cast<const int4*>(items) + item * 2;
  int4 a = load_fresh(from), b = load_fresh(from + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// The KV blocks that a warp takes, every kWarps-th one of an item's. Their numbers come 32 at a time, a number in each lane.
template <int kWarps>
struct Blocks {
  const int32_t* table;
  int count;
  int now, next;

  __device__ __forceinline__ Blocks(const int32_t* row, int first, int last) {
    int warp = threadIdx.x / 32;
    table = row + first + warp;
    count = max(0, (last - first - warp + kWarps - 1) / kWarps);
    now = load(0);
    next = load(32);
  }

  __device__ __forceinline__ int load(int from) const {
    int at = from + threadIdx.x % 32;
    return at < count ? load_fresh(table + at * kWarps) : 0;
  }

  // Its i-th KV block. A warp asks for them in turn.
  __device__ __forceinline__ int number(int i) {
    if (i % 32 == 0 && i > 0) {
      now = next;
      next = load(i + 32);
    }
    return __shfl_sync(~0u, now, i % 32);
  }
};

template <typename T, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32) attend(const __grid_constant__ Nf4DecodeAttention args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  launch_dependents();
  int head = blockIdx.y, warp = threadIdx.x / 32;
  const Item item = load_item(args.items, blockIdx.x);
  if (blockIdx.x >= load_fresh(args.numbers + args.counted)) return;
  bool has_newest = item.end > item.newest;
  int old = min(item.end, item.newest);
  int first = item.begin / kBlock, last = (item.end + kBlock - 1) / kBlock;
  const int32_t* table = args.tables + int64_t{item.blocks} * args.pitch;
  int64_t token_pitch = int64_t{args.kv_heads} * kDim, half = kBlock * token_pitch;
  T* cache = static_cast<T*>(args.cache) + head * kDim;
  unsigned ring = shared_address(memory) + warp * kStages * kStageBytes;
  Blocks<kWarps> blocks(table, first, last);
  auto request = [&](int i, int stage) {
    if (i < blocks.count) {
      int begun = (first + warp + i * kWarps) * kBlock;
      const T* keys = cache + blocks.number(i) * (2 * half);
      copy_block(ring + stage * kStageBytes, keys, token_pitch, half, item.begin - begun, old - begun);
    }
    end_copies();
  };
  // Earlier steps have written the older keys, so the first of them are requested before the launch in front has ended.
#pragma unroll
  for (int i = 0; i < kStages; ++i) request(i, i);
  grid_dependency_wait();
  unsigned queries[kSteps][2];
  load_queries<T>(queries, args, item.row, head * args.group);
  // The warp of the part's last KV block has the new key and value.
  bool writes = has_newest && (last - 1 - first) % kWarps == warp;
  NewRow new_key, new_value;
  if (writes) {
    const T* key = static_cast<const T*>(args.key) + item.row * args.key_token + head * args.key_head;
    new_key = load_new_key(args, key, item.row);
    new_value = load_new_value(static_cast<const T*>(args.value) + item.row * args.value_token + head * args.value_head);
    T* to = cache + load_fresh(table + item.newest / kBlock) * (2 * half) + item.newest % kBlock * token_pitch;
    new_key.store(to);
    new_value.store(to + half);
  }
  Sums sums;
  sums.clear();
  int stage = 0;
#pragma unroll 1
  for (int i = 0; i < blocks.count; ++i) {
    await_copies<kStages - 1>();
    __syncwarp();
    unsigned at = ring + stage * kStageBytes;
    int begun = (first + warp + i * kWarps) * kBlock;
    if (writes && i == blocks.count - 1) {
      new_key.put(at, item.newest % kBlock);
      new_value.put(at + kHalfBytes, item.newest % kBlock);
      __syncwarp();
    }
    sums.add<T>(at, queries, args.scale, item.begin - begun, item.end - begun);
    __syncwarp();
    request(i + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  // The last copies are empty ones; shared memory is used for sums now.
  await_copies<0>();
  __syncthreads();
  auto* shared = reinterpret_cast<Shared<kWarps>*>(memory);
  put_sums(shared, sums);
  __syncthreads();
  finish<T>(args, *shared, blockIdx.x, item.first, item.parts, item.row, head);
#endif
}

}  // namespace attention
}  // namespace nf4
