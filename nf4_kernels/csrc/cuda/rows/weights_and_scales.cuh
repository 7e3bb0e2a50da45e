// The producer warp of linear_rows.cuh, which loads codes and scales into the ring, and the warps that decode the scales.
#pragma once

#include <type_traits>

#include "layout.cuh"

namespace nf4 {

// Where the scales of one weight row and part begin, as indices into absmax or absmax_8bit.
struct ScaleSpan {
  int64_t first;  // of the part's first k block
  int64_t piece;  // first, rounded down to 16 bytes: where the copy starts
  template <bool kNested>
  __device__ static ScaleSpan of(const RowsArgs& args, int row, int begin) {
    int64_t first = (int64_t{row} * args.k_blocks + begin) >> args.scale_shift;
    return {first, first & ~int64_t{kNested ? 15 : 3}};
  }
};

// Bytes of the 16-byte pieces in which the scales of count k blocks of a row lie, wherever in a piece the first one is.
template <int kSize>
__device__ __forceinline__ unsigned most_scale_bytes(const RowsArgs& args, int count) {
  int scales = ((count - 1 + (1 << args.scale_shift) - 1) >> args.scale_shift) + 1;
  return (scales * kSize + (16 - kSize) + 15) & ~15;
}

// Loads a stage: the codes of 16 rows and one part of k, and their scales in whole 16-byte pieces (a piece with one byte
// inside an allocation is inside it whole). One lane issues the copies: its addresses lie in uniform registers, while a warp's
// lanes would issue theirs one by one, at 75 cycles each.
template <typename Layout, bool kNested, bool kGates>
__device__ __forceinline__ void load_stage(const RowsArgs& args, unsigned base, const RowsRun& run, int stage) {
  constexpr int kSize = kNested ? 1 : 4;
  const char* codes = reinterpret_cast<const char*>(args.weight.packed);
  const char* scales = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                               : reinterpret_cast<const char*>(args.weight.absmax);
  unsigned target = base + Layout::kRing + stage * Layout::kStageBytes, full = Layout::full(base, stage);
  int begin = run.part * args.part_blocks, count = min(args.part_blocks, args.k_blocks - begin);
  int rows = run.rows();
  int64_t block = int64_t{args.weight_row<kGates>(run.row, 0)} * args.k_blocks + begin;
  // Added between the upper and the lower half of the rows.
  int64_t blocks_between = int64_t{args.rows_between<kGates>()} * args.k_blocks;
  auto scale_bytes = [&](int64_t first_block, int64_t piece) {
    int64_t last = (first_block + count - 1) >> args.scale_shift;
    return static_cast<unsigned>((((last + 1) * kSize + 15) & ~int64_t{15}) - piece * kSize);
  };
  if (elect_one()) {
    constexpr int kFirst = Layout::kFirstBlocks * Layout::kWarps;
    unsigned all = count * 32, bytes = kFirst ? min(all, kFirst * 32) : all, rest = all - bytes;
    unsigned rest_full = kFirst ? Layout::rest_full(base, stage) : 0;
    uint64_t policy = evict_first_policy();
    constexpr int64_t kInPiece = 16 / kSize - 1;
    if (rows == kGroupRows && args.whole_rows) {
      int64_t last = block + (kGroupRows - 1) * int64_t{args.k_blocks} + blocks_between;
      unsigned last_more = scale_bytes(last, (last >> args.scale_shift) & ~kInPiece);
      unsigned more = args.scale_pitch ? last_more : most_scale_bytes<kSize>(args, count);
      barrier_expect(full, kGroupRows * bytes + (kGroupRows - 1) * more + last_more);
      int64_t code = block;
#pragma unroll
      for (int r = 0; r < kGroupRows; ++r, code += args.k_blocks) {
        if (kGates && r == kHalfRows) code += blocks_between;
        bulk_copy(target + r * Layout::kWeightPitch, codes + code * 32, bytes, full, policy);
      }
      if (args.scale_pitch) {
        int64_t piece = (block >> args.scale_shift) & ~kInPiece;
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r, piece += args.scale_pitch) {
          if (kGates && r == kHalfRows) piece += blocks_between >> args.scale_shift;
          bulk_copy(target + Layout::kScales + r * Layout::kScalePitch, scales + piece * kSize, more, full, policy);
        }
      } else {
        int64_t scale = block;
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r, scale += args.k_blocks) {
          if (kGates && r == kHalfRows) scale += blocks_between;
          int64_t piece = (scale >> args.scale_shift) & ~kInPiece;
          bulk_copy(target + Layout::kScales + r * Layout::kScalePitch, scales + piece * kSize,
                    r + 1 < kGroupRows ? more : last_more, full, policy);
        }
      }
      if constexpr (kFirst > 0) {
        barrier_expect(rest_full, kGroupRows * rest);
        if (rest) {
          code = block + kFirst;
#pragma unroll
          for (int r = 0; r < kGroupRows; ++r, code += args.k_blocks) {
            if (kGates && r == kHalfRows) code += blocks_between;
            bulk_copy(target + r * Layout::kWeightPitch + kFirst * 32, codes + code * 32, rest, rest_full, policy);
          }
        }
      }
    } else {
      unsigned total = 0;
#pragma unroll 1
      for (int r = 0; r < rows; ++r, block += args.k_blocks) {
        if (kGates && r == kHalfRows) block += blocks_between;
        int64_t piece = (block >> args.scale_shift) & ~kInPiece;
        unsigned more = scale_bytes(block, piece);
        bulk_copy(target + r * Layout::kWeightPitch, codes + block * 32, bytes, full, policy);
        bulk_copy(target + Layout::kScales + r * Layout::kScalePitch, scales + piece * kSize, more, full, policy);
        if (rest) {
          bulk_copy(target + r * Layout::kWeightPitch + kFirst * 32, codes + (block + kFirst) * 32, rest, rest_full,
                    policy);
        }
        total += bytes + more;
      }
      barrier_expect(full, total);
      if (kFirst) barrier_expect(rest_full, rows * rest);
    }
  }
  __syncwarp();
}

// Keeps the loads that fill the ring to memory's pace. While the block's activations are not there, they would compete with
// them, and with the last loads of the kernel in front.
__device__ __forceinline__ void pace_loads(const RowsArgs& args, unsigned activations) {
  constexpr int kPiece = 128;
  for (int left = args.waiting_delay; left > 0 && !barrier_passed(activations, 0); left -= kPiece) {
    sleep_ns(min(left, kPiece));
  }
  sleep_ns(args.later_delay);
}

template <typename Layout, bool kNested, bool kGates>
__device__ __forceinline__ void produce(const RowsArgs& args, unsigned base, RowsRun run) {
  RingPosition ring;
  for (int load = 0; !run.done(); run.next(), ++load) {
    if (load == args.stages) barrier_sync(kBarriersReady, 64);
    if (load >= args.stages) barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    load_stage<Layout, kNested, kGates>(args, base, run, ring.stage);
    if (load < args.stages) pace_loads(args, Layout::activations(base));
    ring.advance(args.stages);
  }
}

// What a lane needs to decode the scales of one row and part.
struct RowScales {
  float2 low, high;  // of nested scales: second-level scale and offset, before and from k block `change` of the part on
  int change, count;
  const float* code;
  __device__ __forceinline__ float2 outer(int block) const { return block < change ? low : high; }
  __device__ __forceinline__ float of(uint8_t raw, float2 outer) const {
    return nested_scale(code[raw], outer.x, outer.y);
  }
  __device__ __forceinline__ float of(uint8_t raw, int block) const { return of(raw, outer(block)); }
  __device__ __forceinline__ float of(float raw, int block) const { return block < count ? raw : 0.0f; }
};

// Decodes scales of 64 weights whose rows begin at multiples of four scales: the decoders' half warps take four at a time in
// turn. Upper half warps swap neighbours, so that the two halves of a warp always write different halves of a slot row.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_fours(const char* raw, char* target, const RowScales& scales, int decoder) {
  constexpr int kRuns = (Layout::kStageBlocks + 3) / 4, kBatch = 5;
  constexpr int kDecoders = Layout::kDecoders, kRounds = (kRuns + 2 * kDecoders - 1) / (2 * kDecoders);
  int half = threadIdx.x % 32 / 16;
#pragma unroll
  for (int first = 0; first < kRounds; first += kBatch) {
    float values[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int run = 2 * (kDecoders * (first + i) + decoder) + half;
      if (first + i >= kRounds) break;
      if constexpr (kNested) {
        unsigned word = *reinterpret_cast<const unsigned*>(raw + run * 4);
        if (half) word = __byte_perm(word, 0, 0x2301);
        float2 outer = scales.outer(run * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[i][j] = scales.of(static_cast<uint8_t>(word >> (8 * j)), outer);
      } else {
        float4 four = *reinterpret_cast<const float4*>(raw + run * 16);
        values[i][0] = scales.of(half ? four.y : four.x, run * 4 + half);
        values[i][1] = scales.of(half ? four.x : four.y, run * 4 + (1 ^ half));
        values[i][2] = scales.of(half ? four.w : four.z, run * 4 + 2 + half);
        values[i][3] = scales.of(half ? four.z : four.w, run * 4 + 2 + (1 ^ half));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int run = 2 * (kDecoders * (first + i) + decoder) + half;
      if (first + i >= kRounds) break;
      if (Layout::kStageBlocks % (8 * kDecoders) && run * 4 >= Layout::kStageBlocks) continue;
      char* slots = target + run * 2 * kTableStride + half * 64;
      *reinterpret_cast<float*>(slots) = values[i][0];
      *reinterpret_cast<float*>(slots + 64 - 128 * half) = values[i][1];
      *reinterpret_cast<float*>(slots + kTableStride) = values[i][2];
      *reinterpret_cast<float*>(slots + kTableStride + 64 - 128 * half) = values[i][3];
    }
  }
}

// Decodes scales of any block size and alignment: the decoders' half warps take single k blocks in turn.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_any(const char* raw, char* target, const RowScales& scales, int decoder,
                                           int phase, int shift) {
  using Raw = std::conditional_t<kNested, uint8_t, float>;
  int half = threadIdx.x % 32 / 16;
#pragma unroll 4
  for (int block = 2 * decoder + half; block < Layout::kStageBlocks; block += 2 * Layout::kDecoders) {
    Raw value = reinterpret_cast<const Raw*>(raw)[(block + phase) >> shift];
    *reinterpret_cast<float*>(target + (block >> 1) * kTableStride + half * 64) = scales.of(value, block);
  }
}

// A second-level scale and its offset.
__device__ __forceinline__ float2 outer_scale(const Nf4Weight& weight, int64_t group) {
  return make_float2(__ldg(weight.absmax + group), __ldg(weight.absmax_offset + group * weight.offset_stride));
}

// Decodes the scales of every stage; lane l does row l % 16. All decoders take part in every stage, since whoever waits at a
// barrier must see each of its phases.
template <typename Layout, bool kNested, bool kGates>
__device__ __forceinline__ void decode_scales(const RowsArgs& args, char* shared, RowsRun run, int decoder) {
  static_assert(Layout::kStageBlocks % 4 == 0, "a run of four scales would end in the next stage's slots");
  unsigned base = shared_address(shared);
  int lane = threadIdx.x % 32, row = lane % 16;
  RowScales scales{};
  scales.code = reinterpret_cast<const float*>(shared + Layout::kCode);
  char* slots = shared + Layout::scale_slot(0, 0) + row % 8 * 8 + row / 8 * 4;
  bool fours = args.scale_shift == 0 && args.k_blocks % 4 == 0 && args.part_blocks % 4 == 0;
  // Four scales that are decoded together have to be of one group.
  if (kNested) fours = fours && (args.place_pitch | args.place_first) % 4 == 0;
  RingPosition ring;
  for (; !run.done(); run.next()) {
    int begin = run.part * args.part_blocks;
    scales.count = min(args.part_blocks, args.k_blocks - begin);
    int weight_row = min(args.weight_row<kGates>(run.row, row), args.n - 1);
    ScaleSpan span = ScaleSpan::of<kNested>(args, weight_row, begin);
    int64_t row_block = int64_t{weight_row} * args.k_blocks + begin;
    if (kNested) {
      // A row has fewer than 256 blocks in a part, so they span at most two second-level scales.
      int64_t place = int64_t{weight_row} * args.place_pitch + (args.place_first + begin);
      int group_shift = args.scale_shift + 8;
      int64_t second = place >> group_shift, last = (place + scales.count - 1) >> group_shift;
      scales.low = outer_scale(args.weight, second);
      scales.high = outer_scale(args.weight, min(second + 1, last));
      scales.change = static_cast<int>(((second + 1) << group_shift) - place);
    }
    const char* raw = shared + Layout::kRing + ring.stage * Layout::kStageBytes + Layout::kScales +
                      row * Layout::kScalePitch + (span.first - span.piece) * (kNested ? 1 : 4);
    char* target = slots + ring.stage * Layout::kDecodedStage;
    barrier_wait(Layout::full(base, ring.stage), ring.parity);
    if (fours) {
      decode_fours<Layout, kNested>(raw, target, scales, decoder);
    } else {
      int phase = static_cast<int>(row_block & ((1 << args.scale_shift) - 1));
      decode_any<Layout, kNested>(raw, target, scales, decoder, phase, args.scale_shift);
    }
    barrier_arrive(Layout::decoded(base, ring.stage));
    ring.advance(args.stages);
  }
}

}  // namespace nf4
