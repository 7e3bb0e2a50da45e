// What the kernels of a mixture of experts share: the list of groups, the work's description.
#pragma once

#include "../common.cuh"
#include "../device.cuh"
#include "../pipeline.cuh"

namespace nf4 {

// Groups are choices of one expert, up to `size` of them. sort.cuh's launch leaves a list of them in the workspace: [0] how
// many there are; from kListHeader on each one's expert (`capacity` places); then its choices, -1 where it has fewer than
// size.
constexpr int kListHeader = 4;
struct GroupList {
  const int* words;
  int capacity, size;
  __device__ __forceinline__ int count() const { return load_fresh(words); }
  __device__ __forceinline__ int expert(int group) const { return load_fresh(words + kListHeader + group); }
  __device__ __forceinline__ const int* choices(int group) const {
    return words + kListHeader + capacity + group * size;
  }
};

inline int64_t moe_choices(const Nf4Moe& moe) { return moe.tokens * moe.top_k; }

// The most groups that there can be: every expert may have one that is not full.
inline int64_t moe_capacity(const Nf4Moe& moe, int size) {
  int64_t choices = moe_choices(moe), experts = moe.num_experts < choices ? moe.num_experts : choices;
  int64_t most = choices / size + experts;
  most = most < choices ? most : choices;
  return (most + 3) / 4 * 4;
}

// Bytes of a list, a multiple of 256.
inline int64_t list_bytes(int64_t capacity, int size) {
  return ((kListHeader + capacity + capacity * size) * 4 + 255) / 256 * 256;
}

// Writes zeros to the output rows of choices whose expert does not exist. All warps of a launch call it, each with its number.
template <typename T>
__device__ __forceinline__ void zero_unknown(const int* experts, int num_experts, int choices, T* out, int columns,
                                             int warp, int warps) {
  int lane = threadIdx.x % 32;
  for (int first = warp * 32; first < choices; first += warps * 32) {
    int choice = first + lane;
    int expert = choice < choices ? load_fresh(experts + choice) : 0;
    bool unknown = static_cast<unsigned>(expert) >= static_cast<unsigned>(num_experts);
    for (unsigned left = __ballot_sync(~0u, unknown); left; left &= left - 1) {
      T* row = out + int64_t{first + __ffs(static_cast<int>(left)) - 1} * columns;
      for (int i = lane; i < columns; i += 32) row[i] = from_float<T>(0.0f);
    }
  }
}

}  // namespace nf4
