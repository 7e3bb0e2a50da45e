// The multiplication of a step of moe_warps, and the epilogue of a unit.
#pragma once

#include "loads.cuh"

namespace nf4 {

// With bfloat16 and units of 16 rows, byte permutations make the last quarter of the A registers, since these warps wait for
// shared memory's data path. Down of Qwen3-30B-A3B on an H200 takes 23.8, 32.9 and 41.3 us with 8, 16 and 32 tokens, and
// 24.9, 33.7 and 42.4 by the table alone. Units of 32 rows are slower with it: 55.6 instead of 52.4 us with 48 tokens.
template <typename T, typename Layout>
constexpr bool kPermutes = std::is_same_v<T, __nv_bfloat16> && Layout::kRowTiles == 1;

// The A registers of a word's last two bytes in bfloat16, as build_table() has them. The stretched codes' upper and lower
// bytes are looked up for four nibbles at once: among the first eight codes, among the others, and one of the two is picked.
__device__ __forceinline__ void permute_codes(unsigned& first, unsigned& second, unsigned word) {
  unsigned codes = word >> 16, low3 = codes & 0x7777, pick = (codes >> 1 & 0x4444) | 0x3210;
  unsigned first_eight = __byte_perm(0xbfbfbfbf, 0x00bebebe, low3), others = __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, low3);
  unsigned upper = __byte_perm(first_eight, others, pick);
  first_eight = __byte_perm(0x114180b8, 0x000688d1, low3), others = __byte_perm(0xf9b56dea, 0xb8854f22, low3);
  unsigned lower = __byte_perm(first_eight, others, pick);
  // A byte's upper nibble is the first of its two codes.
  first = __byte_perm(lower, upper, 0x4051);
  second = __byte_perm(lower, upper, 0x6273);
}

// A lane's part of a unit: rows g and g + 8 of each row tile; columns 2t and 2t + 1 of the group's eight choices.
// Activations are loaded a step ahead, and scales before the epilogue of the unit in front: both come from L2.
template <typename T, typename Layout>
struct UnitSums {
  static constexpr int kRowTiles = Layout::kRowTiles;
  uint4 b[kStepBlocks][1][2];  // activations of a step, as B registers
  // Bytes to the activations of column g that are loaded next, and to the next unit's first ones; negative where the column
  // has no choice.
  int x, coming_x;
  RowOfScales<Layout::kNested, Layout::kWhole> scales[kRowTiles][2];
  float sums[kRowTiles][1][4];

  __device__ __forceinline__ UnitSums() {
#pragma unroll
    for (int j = 0; j < kStepBlocks; ++j) b[j][0][0] = b[j][0][1] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) scales[i][0].raw = scales[i][1].raw = {};
  }
  // Finds the activations of a unit that comes.
  __device__ __forceinline__ void look_ahead(const MoeWarpsArgs& args, const WarpUnits& coming,
                                             const HeldGroups<Layout::kSize>& held) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    coming_x = -1;
    if (coming.left <= 0) return;
    int row_of_x = held.choices_of(coming.at())[g];
    if (args.x_choices > 1 && row_of_x > 0) row_of_x /= args.x_choices;
    coming_x = (row_of_x * args.k + t * 16) * static_cast<int>(sizeof(T));
  }
  // Starts the loads of a unit's scales.
  __device__ __forceinline__ void load_scales(const MoeWarpsArgs& args, const WarpUnits& unit,
                                              const HeldGroups<Layout::kSize>& held) {
    if (unit.left <= 0) return;
    int expert_row = held.experts[unit.at()] * args.n, first = unit.row_group() * Layout::kRows + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned row = expert_row + min(first + i * 16 + half * 8, args.n - 1);
        scales[i][half].load(args, row * args.k_blocks);
      }
    }
  }
  // Loads activations of k block j of a step. A column without a choice keeps what it has: its results are not written, and
  // most groups have few choices, and the loads of eight would take as much of L1 as the table's lookups. Beyond k there are
  // zeros.
  __device__ __forceinline__ void load_block(const MoeWarpsArgs& args, int step, int j) {
    // These are no __ldg, since the kernel in front may write them after this one has started.
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const char*>(args.x) + x) + j * 64 * sizeof(T) / 16;
    if (!Layout::kWhole && step * kStepBlocks + j >= args.k_blocks) {
      b[j][0][0] = b[j][0][1] = make_uint4(0, 0, 0, 0);
    } else if (x >= 0) {
      b[j][0][0] = from[0], b[j][0][1] = from[1];
    }
  }
  __device__ __forceinline__ void load_first_step(const MoeWarpsArgs& args) {
    x = coming_x;
#pragma unroll
    for (int j = 0; j < kStepBlocks; ++j) load_block(args, 0, j);
  }
  // Begins a unit, whose first step is there.
  __device__ __forceinline__ void begin(const float* code) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scales[i][half].decode(code);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][0][j] = 0.0f;
    }
  }
  // Adds a step's products. codes: shared memory's address of the lane's codes of k block 0.
  __device__ __forceinline__ void add_step(const MoeWarpsArgs& args, unsigned codes, unsigned lane_offset, int step) {
    int coming_step = step + 1 == args.steps ? 0 : step + 1;
    x = coming_step == 0 ? coming_x : x + kStepBlocks * 64 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int j = 0; j < kStepBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        unsigned at = (codes ^ j * 32) + i * 2048;
        uint2 upper = load_shared(at), lower = load_shared(at + 1024);
        float part[1][4] = {};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          unsigned a[4];
          if (kPermutes<T, Layout> && s == 3) {
            permute_codes(a[0], a[2], upper.y);
            permute_codes(a[1], a[3], lower.y);
          } else {
            decode_codes(a, upper, lower, s, lane_offset, true);
          }
          mma_step<T>(part, a, b[j], s);
        }
        float by_upper = scales[i][0].of(step, j), by_lower = scales[i][1].of(step, j);
        sums[i][0][0] += by_upper * part[0][0];
        sums[i][0][1] += by_upper * part[0][1];
        sums[i][0][2] += by_lower * part[0][2];
        sums[i][0][3] += by_lower * part[0][3];
      }
      load_block(args, coming_step, j);
    }
  }
  // Writes the result of one row and choice.
  __device__ __forceinline__ void write(const MoeWarpsArgs& args, int row, int choice, float value) const {
    if (choice < 0 || row >= args.n) return;
    int64_t at = int64_t{choice} * args.n + row;
    if (args.partial) {
      args.partial[at] = value;
    } else {
      static_cast<T*>(args.out)[at] = from_float<T>(value);
    }
  }
  // Adds biases and writes the unit's results. added: where the thread block adds up choices, [choice][row] of the unit's
  // rows.
  __device__ __forceinline__ void finish(const MoeWarpsArgs& args, const WarpUnits& unit,
                                         const HeldGroups<Layout::kSize>& held, float* added) const {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, expert = held.experts[unit.at()];
    int2 choices = *reinterpret_cast<const int2*>(held.choices_of(unit.at()) + t * 2);  // of the lane's columns
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int place = i * 16 + half * 8 + g, row = unit.row_group() * Layout::kRows + place;
        float bias = 0.0f;
        if (args.bias && row < args.n) bias = to_float(static_cast<const T*>(args.bias)[int64_t{expert} * args.n + row]);
        const float* two = sums[i][0] + half * 2;
        float first = fmaf(two[0], kShrink<T>, bias), second = fmaf(two[1], kShrink<T>, bias);
        if (args.adds) {
          if (choices.x >= 0) added[choices.x * Layout::kRows + place] = first;
          if (choices.y >= 0) added[choices.y * Layout::kRows + place] = second;
        } else {
          write(args, row, choices.x, first);
          write(args, row, choices.y, second);
        }
      }
    }
  }
};

}  // namespace nf4
