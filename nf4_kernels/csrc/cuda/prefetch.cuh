// Weight prefetch: loads the beginning of the next GEMM's weight into L2 while this launch's last bytes are on their way and
// memory has nothing else to do. Before sm_90 these do nothing.
#pragma once

#include <stdint.h>

#include "params.h"

namespace nf4 {

// Asks for bytes (a multiple of 16) at an aligned address, and waits for nothing.
__device__ __forceinline__ void prefetch_l2(const uint8_t* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Prefetches the beginnings of a region's runs piece by piece: all runs' first pieces come before any run's second.
__device__ __forceinline__ void prefetch_runs(const Nf4Next& next, const uint8_t* region, int group_bytes, int bytes) {
  constexpr int kPiece = 8192;
  int pieces = (bytes + kPiece - 1) / kPiece, runs = next.runs * next.parts;
  for (int at = blockIdx.x; at < runs * pieces; at += gridDim.x) {
    int piece = at / runs, run = at - piece * runs;
    int64_t part = run < next.runs ? 0 : next.part_groups;
    if (part) run -= next.runs;
    int64_t group = part + int64_t{run} * next.run_groups + min(run, next.longer_runs);
    // Scales of a group need not be a multiple of 16 bytes; their piece then starts a little earlier.
    const uint8_t* from = region + ((group * group_bytes) & ~int64_t{15}) + piece * kPiece;
    prefetch_l2(from, min(kPiece, bytes - piece * kPiece) & ~15);
  }
}

// Prefetches all of a region, divided over the thread blocks.
__device__ __forceinline__ void prefetch_all(const uint8_t* region, int bytes) {
  int share = ((bytes + gridDim.x - 1) / gridDim.x + 15) & ~15, first = blockIdx.x * share;
  int mine = min(share, bytes - first) & ~15;
  if (mine > 0) prefetch_l2(region + first, mine);
}

// One lane of every thread block calls this, once it has issued the last load of its own weight.
__device__ __forceinline__ void prefetch_next(const Nf4Next& next) {
  if (!next.codes) return;
  prefetch_all(next.absmax, next.absmax_bytes);
  prefetch_all(next.offsets, next.offset_bytes);
  prefetch_runs(next, next.scales, next.group_scale_bytes, next.scale_bytes);
  prefetch_runs(next, next.codes, next.group_code_bytes, next.code_bytes);
}

}  // namespace nf4
