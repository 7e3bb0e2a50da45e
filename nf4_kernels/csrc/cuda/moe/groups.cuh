// Choices grouped by expert within a thread block, so that few choices need no launch that sorts them. Every thread block
// comes to the same groups: their order and that of the choices in them does not depend on timing.
#pragma once

#include "args.cuh"

namespace nf4 {

// The groups that a thread block works on, in shared memory: those from `first` on.
template <int kSize>
struct HeldGroups {
  int* experts;  // [held]
  int* choices;  // [held][kSize], -1 where a group has fewer
  int held;
  __device__ __forceinline__ HeldGroups(char* shared, int held)
      : experts(reinterpret_cast<int*>(shared)), choices(experts + held), held(held) {}
  __device__ __forceinline__ const int* choices_of(int i) const { return choices + i * kSize; }
  __host__ __device__ static int bytes(int held) { return held * (kSize + 1) * 4; }
};

// A thread block's share of `units` consecutive units for each group.
struct Share {
  int first, count;
  __device__ __forceinline__ Share(int groups, int units) {
    int total = groups * units, each = total / gridDim.x, more = total - each * gridDim.x;
    int block = blockIdx.x;
    first = block * each + min(block, more);
    count = each + (block < more);
  }
};

template <int kSize>
__device__ __forceinline__ void clear_held(const HeldGroups<kSize>& held) {
  for (int i = threadIdx.x; i < held.held * kSize; i += blockDim.x) held.choices[i] = -1;
}

template <int kSize>
__device__ __forceinline__ void hold(const HeldGroups<kSize>& held, int at, int slot, int expert, int choice) {
  if (static_cast<unsigned>(at) >= static_cast<unsigned>(held.held)) return;
  held.experts[at] = expert;
  held.choices[at * kSize + slot] = choice;
}

// Up to 32 choices: each warp finds all groups by itself, and the first one writes those of this block. Returns how many
// groups there are. The groups are in the order of their first choices. by_columns: choice c has place c in its group; all
// of them fit, and with `all` every block holds all groups.
template <int kSize>
__device__ __forceinline__ int group_few(const int* experts, int num_experts, int choices, int units, bool by_columns,
                                         bool all, const HeldGroups<kSize>& held) {
  int lane = threadIdx.x % 32;
  int expert = lane < choices ? load_fresh(experts + lane) : -1;
  bool valid = static_cast<unsigned>(expert) < static_cast<unsigned>(num_experts);
  unsigned same = __match_any_sync(~0u, valid ? expert : -1);
  int rank = __popc(same & ((1u << lane) - 1)), leader = __ffs(static_cast<int>(same)) - 1;
  int own = valid && lane == leader ? (__popc(same) + kSize - 1) / kSize : 0, end = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int before = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end += before;
  }
  int groups = __shfl_sync(~0u, end, 31), begin = __shfl_sync(~0u, end - own, leader);
  if (threadIdx.x < 32 && valid) {
    int first = all ? 0 : Share(groups, units).first / units;
    hold(held, begin + rank / kSize - first, by_columns ? lane : rank % kSize, expert, lane);
  }
  return groups;
}

// Sum over the block of the values of threads before this one; the total is left in *total. scratch: 32 ints.
__device__ __forceinline__ int scan_block(int value, int* scratch, int* total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, end = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int before = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end += before;
  }
  if (lane == 31) scratch[warp] = end;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
    int sum = scratch[i];
    if (i < warp) before += sum;
    all += sum;
  }
  *total = all;
  __syncthreads();
  return before + end - value;
}

// Bytes of scratch that group_many() needs.
__host__ __device__ inline int group_scratch_bytes(int choices, int num_experts) {
  return 128 + num_experts * 4 + ((choices + 31) / 32 * num_experts + 1) / 2 * 4;
}

// More choices: a warp ranks 32 choices at a time among themselves, then each expert's counts are summed up. The groups are
// in the order of their experts. With `all` every block holds all groups.
template <int kSize>
__device__ __forceinline__ int group_many(const int* experts, int num_experts, int choices, int units, bool all, char* scratch,
                                          const HeldGroups<kSize>& held) {
  int* sums = reinterpret_cast<int*>(scratch);
  int* begins = sums + 32;  // [num_experts]: each expert's first group
  uint16_t* ranks = reinterpret_cast<uint16_t*>(begins + num_experts);  // [chunk][num_experts]
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, chunks = (choices + 31) / 32;
  for (int i = threadIdx.x; i < (chunks * num_experts + 1) / 2; i += blockDim.x) {
    reinterpret_cast<unsigned*>(ranks)[i] = 0;
  }
  __syncthreads();
  auto expert_of = [&](int choice) {
    int expert = choice < choices ? load_fresh(experts + choice) : -1;
    return static_cast<unsigned>(expert) < static_cast<unsigned>(num_experts) ? expert : -1;
  };
  int first_expert_of = -1;  // the lane's in the warp's first 32 choices
  unsigned first_same = 0;
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    int expert = expert_of(chunk * 32 + lane);
    unsigned same = __match_any_sync(~0u, expert);
    if (chunk == warp) first_expert_of = expert, first_same = same;
    if (expert >= 0 && (same & ((1u << lane) - 1)) == 0) {
      ranks[chunk * num_experts + expert] = static_cast<uint16_t>(__popc(same));
    }
  }
  __syncthreads();
  int per = (num_experts + blockDim.x - 1) / blockDim.x, first_expert = threadIdx.x * per, own = 0;
  for (int e = first_expert; e < min(first_expert + per, num_experts); ++e) {
    int count = 0;
    constexpr int kAtOnce = 8;  // counts whose reads are on their way together
    for (int chunk = 0; chunk < chunks; chunk += kAtOnce) {
      int more[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) more[i] = chunk + i < chunks ? ranks[(chunk + i) * num_experts + e] : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (chunk + i < chunks) ranks[(chunk + i) * num_experts + e] = static_cast<uint16_t>(count);
        count += more[i];
      }
    }
    begins[e] = own;
    own += (count + kSize - 1) / kSize;
  }
  int groups, before = scan_block(own, sums, &groups);
  for (int e = first_expert; e < min(first_expert + per, num_experts); ++e) begins[e] += before;
  __syncthreads();
  int first = all ? 0 : Share(groups, units).first / units;
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    int choice = chunk * 32 + lane, expert = chunk == warp ? first_expert_of : expert_of(choice);
    unsigned same = chunk == warp ? first_same : __match_any_sync(~0u, expert);
    if (expert < 0) continue;
    int rank = ranks[chunk * num_experts + expert] + __popc(same & ((1u << lane) - 1));
    hold(held, begins[expert] + rank / kSize - first, rank % kSize, expert, choice);
  }
  return groups;
}

// Groups that the launch of sort.cuh has listed.
template <int kSize>
__device__ __forceinline__ int take_listed(const GroupList& list, int units, const HeldGroups<kSize>& held) {
  int groups = list.count(), first = Share(groups, units).first / units;
  for (int i = threadIdx.x; i < held.held * kSize; i += blockDim.x) {
    int group = first + i / kSize;
    if (group >= groups) break;
    held.choices[i] = load_fresh(list.choices(group) + i % kSize);
    if (i % kSize == 0) held.experts[i / kSize] = list.expert(group);
  }
  return groups;
}

}  // namespace nf4
