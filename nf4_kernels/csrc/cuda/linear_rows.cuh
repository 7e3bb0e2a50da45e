// Few tokens times an NF4 weight, the weight read once: weight rows stream past activations that stay in registers.
//
// A block owns a range of k ("part") of a run of row groups (16 weight rows each). Consumer warp w of W owns the part's
// 64-wide k blocks w, w + W, w + 2W ...: it keeps their activations in registers for the block's whole life, as the B
// operands (tokens are the n of mma m16n8k16, weights are A), so that only weights and scales move.
//   produce   one warp brings a row group's bytes and scales into a ring of shared-memory stages (bulk copies)
//   decode    one or two warps turn a stage's scales into floats, laid out as the accumulators need them
//   consume   W warps turn bytes into A registers through a 256-entry table (one byte is two neighbouring k of a row:
//             one A register; 32 copies of the table, one a bank, so no lookup ever conflicts), multiply, and put the
//             scale on the sums of each 64 k
//   reduce    one warp adds the W partial sums of a row group in a fixed order and writes the outputs
// With several parts the sums go to the workspace and the block that comes last at a row group adds them, in a fixed
// order again: results do not depend on timing.
//
// k runs in bitsandbytes' order in memory. Within 64 k, lane t of a quad takes weights 16t..16t+15 (8 contiguous bytes);
// the activations are picked to match, so the product sees every k once, in an order of its own.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "pipeline.cuh"

namespace nf4 {

constexpr int kGroupRows = 16;
// Service warps beside the consumers: produce, reduce and two that decode; or, where consumers need 128 registers each
// and a block so has 16 warps only, one that produces and reduces and one that decodes.
template <int kWarps, int kTiles>
constexpr int kDecoders = kWarps == 14 && kTiles > 1 ? 1 : 2;
template <int kWarps, int kTiles>
constexpr int kServiceWarps = 2 * kDecoders<kWarps, kTiles>;
constexpr int kMaxStages = 8;
// Table entries lie 256 bytes apart, so that a byte permute makes an entry's offset: the 32 copies fill the first half of
// each entry; the second halves hold the decoded scales.
constexpr int kTableStride = 256;
constexpr int kTableBytes = 256 * kTableStride;
// Where dynamic shared memory starts from sm_80 on: the system's first KB lies before it. As a constant it goes into the
// table lookups' immediate offsets; the kernel checks it.
constexpr int kSharedBase = 1024;

struct RowsArgs {
  Nf4Weight weight;
  const void* x;
  const void* bias;
  void* out;
  float4* partial;
  int* counters;
  int m, n, k;
  int k_blocks;     // k / 64
  int scale_shift;  // log2(blocksize / 64)
  int groups;       // ceil(n / 16)
  int parts;
  int part_blocks;
  int stages;  // of the ring
  int units_per_block;   // units = groups * parts; the first blocks_with_more blocks do one more
  int blocks_with_more;
};

// Where things lie in dynamic shared memory.
template <int kWarps, int kBlocks, int kTiles, bool kNested>
struct RowsLayout {
  static constexpr int kDecoders = nf4::kDecoders<kWarps, kTiles>;
  static constexpr int kStageBlocks = kWarps * kBlocks;
  // An odd multiple of 32 bytes: the rows g = 0..3 of a half warp's 8-byte reads then lie in different banks.
  static constexpr int kWeightPitch = kStageBlocks * 32 + (kStageBlocks % 2 ? 0 : 32);
  // Room from the 16-byte boundary before the first scale to the one after the last.
  static constexpr int kScaleBytes = kStageBlocks * (kNested ? 1 : 4);
  static constexpr int kScalePitch = ((kScaleBytes + 15 + 15) / 16 | 1) * 16;
  static constexpr int kScales = kGroupRows * kWeightPitch;
  static constexpr int kStageBytes = kScales + kGroupRows * kScalePitch;
  static constexpr int kCode = kTableBytes;
  static constexpr int kSums = kCode + 1024;
  static constexpr int kBarriers = kSums + 2 * kWarps * kTiles * 512;
  static constexpr int kRing = kBarriers + (3 * kMaxStages + 4) * 8 + 32;
  static_assert(kRing % 128 == 0, "");
  // The decoded scales of a stage: 64 bytes a k block, two blocks between table entries.
  static constexpr int kDecodedStage = (kStageBlocks + 1) / 2 * kTableStride;
  static constexpr int kStageLimit = kTableBytes / kDecodedStage < kMaxStages ? kTableBytes / kDecodedStage : kMaxStages;

  __host__ __device__ static int total(int stages) { return kRing + stages * kStageBytes; }
  __device__ static unsigned full(unsigned base, int stage) { return base + kBarriers + stage * 8; }
  __device__ static unsigned decoded(unsigned base, int stage) { return base + kBarriers + (kMaxStages + stage) * 8; }
  __device__ static unsigned empty(unsigned base, int stage) { return base + kBarriers + (2 * kMaxStages + stage) * 8; }
  __device__ static unsigned sums_full(unsigned base, int i) { return base + kBarriers + (3 * kMaxStages + i) * 8; }
  __device__ static unsigned sums_empty(unsigned base, int i) { return base + kBarriers + (3 * kMaxStages + 2 + i) * 8; }
  // Byte offset of the decoded scales [row % 8][row / 8] of one k block of a stage.
  __device__ static int scale_slot(int stage, int block) {
    return stage * kDecodedStage + (block >> 1) * kTableStride + 128 + (block & 1) * 64;
  }
};

template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                         const float (&c)[4]);
template <>
__device__ __forceinline__ void multiply<__half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                                 const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                                        const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Which units (part, row group) a block does: a contiguous run, row groups running fastest.
struct RowsRun {
  int first, last, part, group, groups;
  __device__ explicit RowsRun(const RowsArgs& args) : groups(args.groups) {
    int block = blockIdx.x;
    first = block * args.units_per_block + min(block, args.blocks_with_more);
    last = first + args.units_per_block + (block < args.blocks_with_more);
    part = args.parts == 1 ? 0 : static_cast<int>(static_cast<unsigned>(first) / static_cast<unsigned>(groups));
    group = first - part * groups;
  }
  __device__ __forceinline__ bool done() const { return first == last; }
  __device__ __forceinline__ void next() {
    ++first;
    if (++group == groups) {
      group = 0;
      ++part;
    }
  }
};

struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Adds bias, rounds once and writes the 16 rows x 8 tokens that a warp's accumulators hold.
template <typename T>
__device__ __forceinline__ void write_outputs(const RowsArgs& args, int group, int token_tile, float4 sum) {
  int lane = threadIdx.x % 32, row = group * kGroupRows + lane / 4, token = token_tile * 8 + lane % 4 * 2;
  T* out = static_cast<T*>(args.out);
  const T* bias = static_cast<const T*>(args.bias);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int r = row + half * 8;
    if (r >= args.n) continue;
    float add = bias ? to_float(bias[r]) : 0.0f;
    int64_t at = int64_t{token} * args.n + r;
    if (token < args.m) out[at] = from_float<T>((half ? sum.z : sum.x) + add);
    if (token + 1 < args.m) out[at + args.n] = from_float<T>((half ? sum.w : sum.y) + add);
  }
}

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

// One unit's copies: lanes 0-15 a row's bytes each, lanes 16-31 a row's scales.
template <typename Layout, bool kNested>
__device__ __forceinline__ void copy_unit(const RowsArgs& args, unsigned base, const RowsRun& run, int stage) {
  int lane = threadIdx.x % 32, row_in_group = lane % kGroupRows, row = run.group * kGroupRows + row_in_group;
  unsigned target = base + Layout::kRing + stage * Layout::kStageBytes, full = Layout::full(base, stage);
  int begin = run.part * args.part_blocks, count = min(args.part_blocks, args.k_blocks - begin);
  if (row >= args.n) {
    copy_and_arrive(0, nullptr, 0, full);
  } else if (lane < kGroupRows) {
    const uint8_t* source = args.weight.packed + (int64_t{row} * args.k_blocks + begin) * 32;
    copy_and_arrive(target + row_in_group * Layout::kWeightPitch, source, count * 32, full);
  } else {
    // Whole 16-byte pieces: a piece with one byte inside an allocation is inside it whole.
    constexpr int kSize = kNested ? 1 : 4;
    ScaleSpan span = ScaleSpan::of<kNested>(args, row, begin);
    int64_t last = (int64_t{row} * args.k_blocks + begin + count - 1) >> args.scale_shift;
    unsigned bytes = static_cast<unsigned>((((last + 1) * kSize + 15) & ~int64_t{15}) - span.piece * kSize);
    const char* source = kNested ? reinterpret_cast<const char*>(args.weight.absmax_8bit)
                                 : reinterpret_cast<const char*>(args.weight.absmax);
    copy_and_arrive(target + Layout::kScales + row_in_group * Layout::kScalePitch, source + span.piece * kSize, bytes,
                    full);
  }
}

template <typename Layout, bool kNested>
__device__ __forceinline__ void produce(const RowsArgs& args, unsigned base, RowsRun run) {
  RingPosition ring;
  for (; !run.done(); run.next()) {
    barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
    copy_unit<Layout, kNested>(args, base, run, ring.stage);
    ring.advance(args.stages);
  }
}

// What a lane needs to turn the raw scales of one row and unit into floats.
struct RowScales {
  float2 low, high;  // nested: the scale of the scales and their offset, before and from k block `change` of the part on
  int change, count;
  const float* code;
  __device__ __forceinline__ float2 outer(int block) const { return block < change ? low : high; }
  __device__ __forceinline__ float of(uint8_t raw, float2 outer) const {
    return nested_scale(code[raw], outer.x, outer.y);
  }
  __device__ __forceinline__ float of(uint8_t raw, int block) const { return of(raw, outer(block)); }
  __device__ __forceinline__ float of(float raw, int block) const { return block < count ? raw : 0.0f; }
};

// Blocks of 64 whose rows begin at multiples of four scales: runs of four go around the decoders' half warps.
// Upper half warps swap neighbours, so that the two halves of a warp always write different halves of a slot row.
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

// Any blocksize and alignment: single blocks go around the decoders' half warps.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode_any(const char* raw, char* target, const RowScales& scales, int decoder, int phase,
                                           int shift) {
  using Raw = std::conditional_t<kNested, uint8_t, float>;
  int half = threadIdx.x % 32 / 16;
#pragma unroll 4
  for (int block = 2 * decoder + half; block < Layout::kStageBlocks; block += 2 * Layout::kDecoders) {
    Raw value = reinterpret_cast<const Raw*>(raw)[(block + phase) >> shift];
    *reinterpret_cast<float*>(target + (block >> 1) * kTableStride + half * 64) = scales.of(value, block);
  }
}

// A scale of scales and its offset.
__device__ __forceinline__ float2 outer_scale(const Nf4Weight& weight, int64_t group) {
  return make_float2(__ldg(weight.absmax + group), __ldg(weight.absmax_offset + group * weight.offset_stride));
}

// Lane l does row l % 16. All decoders take part in every unit: a barrier's waiter must see each of its phases.
template <typename Layout, bool kNested>
__device__ __forceinline__ void decode(const RowsArgs& args, char* shared, RowsRun run, int decoder) {
  static_assert(Layout::kStageBlocks % 2 == 0, "two k blocks share a slot row");
  unsigned base = shared_address(shared);
  int lane = threadIdx.x % 32, row = lane % 16;
  RowScales scales{};
  scales.code = reinterpret_cast<const float*>(shared + Layout::kCode);
  char* slots = shared + Layout::scale_slot(0, 0) + row % 8 * 8 + row / 8 * 4;
  bool fours = args.scale_shift == 0 && args.k_blocks % 4 == 0 && args.part_blocks % 4 == 0;
  RingPosition ring;
  for (; !run.done(); run.next()) {
    int begin = run.part * args.part_blocks;
    scales.count = min(args.part_blocks, args.k_blocks - begin);
    int weight_row = min(run.group * kGroupRows + row, args.n - 1);
    ScaleSpan span = ScaleSpan::of<kNested>(args, weight_row, begin);
    int64_t row_block = int64_t{weight_row} * args.k_blocks + begin;
    if (kNested) {
      // A row's blocks of a part are fewer than 256: they span at most two scales of scales.
      int64_t second = span.first >> 8, last = (row_block + scales.count - 1) >> (args.scale_shift + 8);
      scales.low = outer_scale(args.weight, second);
      scales.high = outer_scale(args.weight, min(second + 1, last));
      scales.change = static_cast<int>((((second + 1) << 8) << args.scale_shift) - row_block);
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
    __syncwarp();
    if (lane == 0) barrier_arrive(Layout::decoded(base, ring.stage));
    ring.advance(args.stages);
  }
}

// The A register of one byte: the byte's entry in this lane's copy of the table.
__device__ __forceinline__ unsigned lookup(unsigned word, int byte, unsigned lane_offset) {
  unsigned pair;
  asm("ld.shared.b32 %0, [%1 + %2];"
      : "=r"(pair)
      : "r"(__byte_perm(word, lane_offset, 0x5504 | (byte << 4))), "n"(kSharedBase));
  return pair;
}

// The activations of one part that a consumer warp needs, as B registers.
template <typename T, int kWarps, int kBlocks, int kTiles>
__device__ __forceinline__ void load_activations(const RowsArgs& args, int part, uint4 (&b)[kBlocks][kTiles][2]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = part * args.part_blocks, end = min(begin + args.part_blocks, args.k_blocks);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    int block = begin + i * kWarps + warp;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int token = tile * 8 + g;
      const uint4* from =
          reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) + int64_t{token} * args.k + block * 64 + t * 16);
      bool valid = block < end && token < args.m;
      b[i][tile][0] = valid ? __ldg(from) : make_uint4(0, 0, 0, 0);
      b[i][tile][1] = valid ? __ldg(from + 1) : make_uint4(0, 0, 0, 0);
    }
  }
}

template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested>
__device__ __forceinline__ void consume(const RowsArgs& args, char* shared, RowsRun run,
                                        uint4 (&b)[kBlocks][kTiles][2]) {
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned base = shared_address(shared), lane_offset = lane * 4;
  int loaded = run.part;
  const char* my_bytes = shared + Layout::kRing + g * Layout::kWeightPitch + warp * 32 + t * 8;
  const char* my_scales = shared + Layout::scale_slot(0, warp) + g * 8;
  float4* my_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + warp * kTiles * 32 + lane;
  RingPosition ring, sums;
  for (; !run.done(); run.next()) {
    if (run.part != loaded) {
      loaded = run.part;
      load_activations<T, kWarps, kBlocks, kTiles>(args, loaded, b);
    }
    float acc[kTiles][4] = {};
    const char* bytes = my_bytes + ring.stage * Layout::kStageBytes;
    const char* scales = my_scales + ring.stage * Layout::kDecodedStage;
    barrier_wait(Layout::full(base, ring.stage), ring.parity);
    barrier_wait(Layout::decoded(base, ring.stage), ring.parity);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint2 upper = *reinterpret_cast<const uint2*>(bytes + i * kWarps * 32);
      uint2 lower = *reinterpret_cast<const uint2*>(bytes + 8 * Layout::kWeightPitch + i * kWarps * 32);
      float part_sum[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        unsigned up = step < 2 ? upper.x : upper.y, low = step < 2 ? lower.x : lower.y;
        int byte = step % 2 * 2;
        unsigned a[4] = {lookup(up, byte, lane_offset), lookup(low, byte, lane_offset),
                         lookup(up, byte + 1, lane_offset), lookup(low, byte + 1, lane_offset)};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4& four = b[i][tile][step / 2];
          multiply<T>(part_sum[tile], a, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y, part_sum[tile]);
        }
      }
      static_assert(kWarps % 2 == 0, "two k blocks share a slot row");
      float2 scale = *reinterpret_cast<const float2*>(scales + i * (kWarps / 2) * kTableStride);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        acc[tile][0] += scale.x * part_sum[tile][0];
        acc[tile][1] += scale.x * part_sum[tile][1];
        acc[tile][2] += scale.y * part_sum[tile][2];
        acc[tile][3] += scale.y * part_sum[tile][3];
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(Layout::empty(base, ring.stage));
    ring.advance(args.stages);
    barrier_wait(Layout::sums_empty(base, sums.stage), sums.parity ^ 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      my_sums[sums.stage * kWarps * kTiles * 32 + tile * 32] =
          make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(Layout::sums_full(base, sums.stage));
    sums.advance(2);
  }
}

__device__ __forceinline__ void add(float4& sum, float4 value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

template <typename T, int kWarps, int kTiles, typename Layout>
__device__ __forceinline__ void reduce_unit(const RowsArgs& args, char* shared, const RowsRun& run, RingPosition ring) {
  int lane = threadIdx.x % 32;
  unsigned base = shared_address(shared);
  barrier_wait(Layout::sums_full(base, ring.stage), ring.parity);
  const float4* from =
      reinterpret_cast<const float4*>(shared + Layout::kSums) + ring.stage * kWarps * kTiles * 32 + lane;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float4 sum = from[tile * 32];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) add(sum, from[(warp * kTiles + tile) * 32]);
    if (args.parts == 1) {
      write_outputs<T>(args, run.group, tile, sum);
    } else {
      __stcg(args.partial + (int64_t{run.first} * kTiles + tile) * 32 + lane, sum);
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(Layout::sums_empty(base, ring.stage));
}

template <typename T, int kWarps, int kTiles, typename Layout>
__device__ __forceinline__ void reduce(const RowsArgs& args, char* shared, RowsRun run) {
  RingPosition ring;
  for (; !run.done(); run.next()) {
    reduce_unit<T, kWarps, kTiles, Layout>(args, shared, run, ring);
    ring.advance(2);
  }
}

// One warp for both: a stage is filled again as soon as it is empty, then the sums that came of it are added.
template <typename T, int kWarps, int kTiles, typename Layout, bool kNested>
__device__ __forceinline__ void produce_and_reduce(const RowsArgs& args, char* shared, RowsRun run) {
  unsigned base = shared_address(shared);
  RowsRun ahead = run;
  for (int stage = 0; stage < args.stages && !ahead.done(); ++stage, ahead.next()) {
    copy_unit<Layout, kNested>(args, base, ahead, stage);
  }
  RingPosition ring, sums;
  for (; !run.done(); run.next()) {
    barrier_wait(Layout::empty(base, ring.stage), ring.parity);
    if (!ahead.done()) {
      copy_unit<Layout, kNested>(args, base, ahead, ring.stage);
      ahead.next();
    }
    reduce_unit<T, kWarps, kTiles, Layout>(args, shared, run, sums);
    ring.advance(args.stages);
    sums.advance(2);
  }
}

// The block that is last to finish a row group adds its parts, in their order, and leaves the counter as it was: zero.
template <typename T, int kTiles>
__device__ __forceinline__ void combine(const RowsArgs& args, RowsRun run) {
  int lane = threadIdx.x % 32;
  for (int unit = run.first + threadIdx.x / 32; unit < run.last; unit += blockDim.x / 32) {
    int group = unit % args.groups, before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(args.counters + group, 1);
    }
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before != args.parts - 1) continue;
    __threadfence();
    float4 sum[kTiles] = {};
#pragma unroll 2
    for (int part = 0; part < args.parts; ++part) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        add(sum[tile], __ldcg(args.partial + ((int64_t{part} * args.groups + group) * kTiles + tile) * 32 + lane));
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) write_outputs<T>(args, group, tile, sum[tile]);
    if (lane == 0) args.counters[group] = 0;
  }
}

template <typename Layout>
__device__ __forceinline__ void init_barriers(unsigned base, int stages, int warps) {
  for (int i = 0; i < stages; ++i) {
    barrier_init(Layout::full(base, i), 32);
    barrier_init(Layout::decoded(base, i), Layout::kDecoders);
    barrier_init(Layout::empty(base, i), warps);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(Layout::sums_full(base, i), warps);
    barrier_init(Layout::sums_empty(base, i), 1);
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// All 32 copies of the 16 entries whose first code is `first`, by one warp.
template <typename T>
__device__ __forceinline__ void build_table(char* shared, int first) {
  // Immediates: the constant bank would be a cold read on the way to the first product.
  constexpr float codes[16] = {NF4_CODEBOOK};
  float high = codes[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) high = first == i ? codes[i] : high;
  char* target = shared + first * 16 * kTableStride + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) *reinterpret_cast<unsigned*>(target + i * kTableStride) = pack2<T>(high, codes[i]);
}

template <typename T, int kWarps, int kBlocks, int kTiles, bool kNested>
__global__ void __launch_bounds__((kWarps + kServiceWarps<kWarps, kTiles>) * 32, 1) linear_rows(const __grid_constant__ RowsArgs args) {
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)  // the others' shared memory is too small
  using Layout = RowsLayout<kWarps, kBlocks, kTiles, kNested>;
  extern __shared__ __align__(128) char shared[];
  unsigned base = shared_address(shared);
  if (base != kSharedBase) __trap();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kThreads = (kWarps + kServiceWarps<kWarps, kTiles>) * 32, kFirstDecoder = kWarps + Layout::kDecoders;
  RowsRun run(args);
  if (warp == kWarps) {
    if (lane == 0) init_barriers<Layout>(base, args.stages, kWarps);
    __syncwarp();
    barrier_signal(3, kThreads);
    if constexpr (Layout::kDecoders == 1) {
      produce_and_reduce<T, kWarps, kTiles, Layout, kNested>(args, shared, run);
    } else {
      produce<Layout, kNested>(args, base, run);
    }
  } else if (warp < kWarps) {
    uint4 b[kBlocks][kTiles][2];
    load_activations<T, kWarps, kBlocks, kTiles>(args, run.part, b);
    for (int first = warp; first < 16; first += kWarps) build_table<T>(shared, first);
    barrier_sync(1, kWarps * 32);
    barrier_sync(3, kThreads);
    consume<T, kWarps, kBlocks, kTiles, kNested>(args, shared, run, b);
  } else if (warp < kFirstDecoder) {
    barrier_sync(3, kThreads);
    reduce<T, kWarps, kTiles, Layout>(args, shared, run);
  } else {
    constexpr int kReads = 2 / Layout::kDecoders;
    int thread = threadIdx.x - kFirstDecoder * 32;
    float4 codes[kReads];
#pragma unroll
    for (int i = 0; kNested && i < kReads; ++i) {
      codes[i] = __ldg(reinterpret_cast<const float4*>(args.weight.absmax_code) + thread + i * 32);
    }
    barrier_sync(3, kThreads);
#pragma unroll
    for (int i = 0; kNested && i < kReads; ++i) {
      reinterpret_cast<float4*>(shared + Layout::kCode)[thread + i * 32] = codes[i];
    }
    barrier_sync(2, Layout::kDecoders * 32);
    decode<Layout, kNested>(args, shared, run, warp - kFirstDecoder);
  }
  if (args.parts > 1) {
    __syncthreads();
    combine<T, kTiles>(args, run);
  }
#endif
}

}  // namespace nf4
