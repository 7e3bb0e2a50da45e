// The launch in front of work.cuh's GEMM: its first thread block lists the groups, the others write x in the order of k that
// the GEMM's tiles have, and the zeros of choices whose expert does not exist.
#pragma once

#include "../sort.cuh"

namespace nf4 {

struct PrepareArgs {
  SortArgs sort;
  const void* x;  // [rows][k]
  uint4* ordered;  // [rows][padded_blocks * 64]; beyond k are zeros
  void* zeroed;    // null, or the output, of so many columns
  int columns, rows, k_blocks, padded_blocks;
};

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
  if (args.zeroed) {
    zero_unknown(args.sort.experts, args.sort.num_experts, args.sort.choices, static_cast<T*>(args.zeroed), args.columns,
                 block_of * (kSortThreads / 32) + static_cast<int>(threadIdx.x) / 32, blocks * (kSortThreads / 32));
  }
  int row_chunks = args.padded_blocks * 8;
  int64_t chunks = int64_t{args.rows} * row_chunks, step = int64_t{blocks} * kSortThreads;
  for (int64_t at = int64_t{block_of} * kSortThreads + threadIdx.x; at < chunks; at += step) {
    int64_t row = at / row_chunks;
    int rest = static_cast<int>(at - row * row_chunks), chunk = rest % 8, block = rest / 8;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (block < args.k_blocks) {
      const unsigned* from =
          reinterpret_cast<const unsigned*>(static_cast<const T*>(args.x) + (row * args.k_blocks + block) * 64) + chunk;
      // This is no __ldg, since the kernel in front may write them after this one has started.
      words = make_uint4(__ldcg(from), __ldcg(from + 8), __ldcg(from + 16), __ldcg(from + 24));
    }
    args.ordered[at] = words;
  }
}

}  // namespace nf4
