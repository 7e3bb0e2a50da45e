// Lists the groups of choices for the launches that follow (args.cuh). One thread block counts the choices of
// each expert and hands out their places. Which place of its group a choice has may depend on timing; no result does.
#pragma once

#include "groups.cuh"

namespace nf4 {

constexpr int kSortThreads = 1024;

struct SortArgs {
  const int* experts;
  int* words;  // the list
  int choices, num_experts, capacity, size;
};

inline int sort_shared_bytes(int num_experts) { return (num_experts * 3 + 32) * 4; }

// counts: in shared memory, the number of choices of each expert; behind these each expert's places that are taken, and
// then each expert's first group.
__device__ __forceinline__ void sort_choices(const SortArgs& args, int* counts) {
  int* taken = counts + args.num_experts;
  int* begins = taken + args.num_experts;
  int* sums = begins + args.num_experts;
  int* of_experts = args.words + kListHeader;
  int* places = of_experts + args.capacity;
  for (int e = threadIdx.x; e < args.num_experts; e += kSortThreads) counts[e] = taken[e] = 0;
  __syncthreads();
  auto known = [&](int expert) { return static_cast<unsigned>(expert) < static_cast<unsigned>(args.num_experts); };
#pragma unroll 4
  for (int c = threadIdx.x; c < args.choices; c += kSortThreads) {
    int expert = load_fresh(args.experts + c);
    if (known(expert)) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  int per = (args.num_experts + kSortThreads - 1) / kSortThreads, first = threadIdx.x * per, own = 0;
  for (int e = first; e < min(first + per, args.num_experts); ++e) {
    begins[e] = own;
    own += (counts[e] + args.size - 1) / args.size;
  }
  int groups, before = scan_block(own, sums, &groups);
  for (int e = first; e < min(first + per, args.num_experts); ++e) begins[e] += before;
  if (threadIdx.x == 0) args.words[0] = groups;
  __syncthreads();
  int lane = threadIdx.x % 32;
  for (int e = threadIdx.x / 32; e < args.num_experts; e += kSortThreads / 32) {
    int count = (counts[e] + args.size - 1) / args.size;
    for (int i = lane; i < count; i += 32) of_experts[begins[e] + i] = e;
    int end = (begins[e] + count) * args.size;
    for (int i = begins[e] * args.size + counts[e] + lane; i < end; i += 32) places[i] = -1;
  }
#pragma unroll 4
  for (int c = threadIdx.x; c < args.choices; c += kSortThreads) {
    int expert = load_fresh(args.experts + c);
    if (known(expert)) places[begins[expert] * args.size + atomicAdd(taken + expert, 1)] = c;
  }
}

static __global__ void __launch_bounds__(kSortThreads, 1) sort_alone(const __grid_constant__ SortArgs args) {
  extern __shared__ __align__(128) int counts[];
  launch_dependents();
  grid_dependency_wait();
  sort_choices(args, counts);
}

// What the launch is told, and the list that it writes, at the workspace's beginning.
inline SortArgs sort_args(const Nf4Moe& moe, int size, GroupList* list) {
  int capacity = static_cast<int>(moe_capacity(moe, size));
  *list = {static_cast<const int*>(moe.workspace), capacity, size};
  return {moe.experts, static_cast<int*>(moe.workspace), static_cast<int>(moe_choices(moe)), moe.num_experts, capacity,
          size};
}

inline cudaError_t launch_sort(const Nf4Moe& moe, const SortArgs& args) {
  return launch_kernel(sort_alone, {1, kSortThreads, sort_shared_bytes(moe.num_experts)}, moe.stream, args);
}

}  // namespace nf4
