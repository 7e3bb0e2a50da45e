// A launch of linear_wgmma.cuh: how its work is divided, and the function that launches an instance.
#pragma once

#include "instances.cuh"

namespace nf4 {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// How a GEMM's work is divided: Wgmma.workspace_bytes() of nf4_kernels/plan/wgmma.py counts the same.
struct WgmmaSizes {
  int64_t row_tiles, token_tiles;
  int64_t steps;       // k steps of a tile
  int64_t lines;       // that TileScheduler divides over thread blocks
  int64_t line_steps;  // k steps of a line
  int64_t blocks;      // thread blocks of a line
  int64_t tile_bytes;  // of all tiled activations
  WgmmaSizes(const Nf4Linear& linear, const WgmmaPlan& plan) {
    row_tiles = ceil_div(linear.weight.n, plan.groups * 64);
    token_tiles = ceil_div(linear.m, plan.tokens);
    steps = ceil_div(linear.weight.k, 256);
    lines = plan.first_split_steps ? row_tiles * token_tiles : 1;
    line_steps = row_tiles * token_tiles * steps / lines;
    blocks = plan.grid / lines < line_steps ? plan.grid / lines : line_steps;
    tile_bytes = token_tiles * plan.tokens * steps * 512;
  }
};

// Launches an instance, and what tiles the activations in front of it; launches/ defines it for all instances. kTimed: a
// warpgroup times its decoding.
template <typename Instance, bool kTimed>
cudaError_t launch_instance(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                            const CUtensorMap& map);

}  // namespace nf4
