// The launches in front of work.cuh's GEMM. prepare_choices: its first thread block lists the groups, the others write x in the
// order of k that the GEMM's tiles have. Or a launch lists the groups, and tile_choices writes the tiles themselves. Both write
// the zeros of choices whose expert does not exist.
#pragma once

#include "../sort.cuh"

namespace nf4 {

struct PrepareArgs {
  SortArgs sort;
  const void* x;  // [rows][k]
  uint4* ordered;  // [rows][padded_blocks * 64], or tiles; beyond k are zeros
  void* zeroed;    // null, or the output, which has the number of columns below
  int columns, rows, k_blocks, padded_blocks;
};

// A thread block's part of the zeros. block_of: its number among `blocks`.
template <typename T>
__device__ __forceinline__ void zero_part(const PrepareArgs& args, int block_of, int blocks) {
  if (!args.zeroed) return;
  zero_unknown(args.sort.experts, args.sort.num_experts, args.sort.choices, static_cast<T*>(args.zeroed), args.columns,
               block_of * (kSortThreads / 32) + static_cast<int>(threadIdx.x) / 32, blocks * (kSortThreads / 32));
}

// The 16-byte chunk of a row's 64 k, zeros beyond k. No load is an __ldg, since the kernel in front may write x after this
// one has started.
template <typename T>
__device__ __forceinline__ uint4 load_chunk(const PrepareArgs& args, int64_t row, int block, int chunk) {
  if (block >= args.k_blocks) return make_uint4(0, 0, 0, 0);
  const unsigned* from =
      reinterpret_cast<const unsigned*>(static_cast<const T*>(args.x) + (row * args.k_blocks + block) * 64) + chunk;
  return make_uint4(__ldcg(from), __ldcg(from + 8), __ldcg(from + 16), __ldcg(from + 24));
}

// Within 64 k, the 16-byte chunk i of a row holds its 4-byte words i, 8 + i, 16 + i and 24 + i: see
// ../../wgmma_sm90/linear_wgmma.cuh.
template <typename T>
__global__ void __launch_bounds__(kSortThreads, 1) prepare_choices(const __grid_constant__ PrepareArgs args) {
  extern __shared__ __align__(128) int counts[];
  launch_dependents();
  grid_dependency_wait();
  if (blockIdx.x == 0) {
    sort_choices(args.sort, counts);
    return;
  }
  int block_of = blockIdx.x - 1, blocks = gridDim.x - 1;
  zero_part<T>(args, block_of, blocks);
  int row_chunks = args.padded_blocks * 8;
  int64_t chunks = int64_t{args.rows} * row_chunks, step = int64_t{blocks} * kSortThreads;
  for (int64_t at = int64_t{block_of} * kSortThreads + threadIdx.x; at < chunks; at += step) {
    int64_t row = at / row_chunks;
    int rest = static_cast<int>(at - row * row_chunks), chunk = rest % 8, block = rest / 8;
    args.ordered[at] = load_chunk<T>(args, row, block, chunk);
  }
}

// The tiles of the groups that a launch in front has listed, as ../../wgmma_sm90/tile_activations.cuh writes those of tokens.
// Places without a choice are left as they are, since their results are not written. x_choices: choices that share a
// row of x.
template <typename T>
__global__ void __launch_bounds__(kSortThreads, 1)
    tile_choices(const __grid_constant__ PrepareArgs args, const __grid_constant__ GroupList list, int x_choices) {
  launch_dependents();
  grid_dependency_wait();
  zero_part<T>(args, blockIdx.x, gridDim.x);
  int row_chunks = args.padded_blocks * 8;
  int64_t chunks = int64_t{list.count()} * list.size * row_chunks, step = int64_t{gridDim.x} * kSortThreads;
  for (int64_t at = int64_t{blockIdx.x} * kSortThreads + threadIdx.x; at < chunks; at += step) {
    int64_t place = at / row_chunks;
    int rest = static_cast<int>(at - place * row_chunks), chunk = rest % 8, block = rest / 8;
    int group = static_cast<int>(place / list.size), row = static_cast<int>(place - int64_t{group} * list.size);
    int choice = load_fresh(list.choices(group) + row);
    if (choice < 0) continue;
    int64_t tile = int64_t{group} * args.padded_blocks + block;
    args.ordered[(tile * list.size + row) * 8 + (chunk ^ row % 8)] =
        load_chunk<T>(args, choice / x_choices, block, chunk);
  }
}

}  // namespace nf4
