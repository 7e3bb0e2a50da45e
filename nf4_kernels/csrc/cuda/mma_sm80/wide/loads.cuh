// What linear_mma_wide.cuh loads: codes and activations by cp.async, scales by the thread whose row it is. Nothing branches, so
// that all of it is between mma.
#pragma once

#include "layout.cuh"

namespace nf4 {

// Loads a thread's share of the codes and activations of a tile, k step by k step. The first one is not the same for all rows, so
// that thread blocks do not read the same activations at the same time; behind the last one comes that with the least k.
template <typename T, typename Shape>
struct WideLoader {
  static constexpr int kCodes = Shape::kRows * 2 / Shape::kThreads, kPieces = (Shape::kTokens + 63) / 64;
  const uint8_t* codes[kCodes];
  const T* tokens;
  unsigned codes_to, tokens_to, codes_step, tokens_step;
  int left;  // tokens of the tile from this thread's first one on

  __device__ __forceinline__ WideLoader(const MmaArgs& args, unsigned shared, const MmaStep& at, unsigned begin)
      : codes_step(begin), tokens_step(begin) {
    int row = threadIdx.x / 2, half = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      int tile = at.row_tile * (Shape::kRows / 16) + row / 16 + i * 8;
      codes[i] = args.weight.packed + (int64_t{args.row_within(tile, row % 16)} * args.k_steps + at.k_step + begin) * 32 + half * 16;
    }
    // Rows 4 to 7 of 8 have their pieces swapped, so that a warp's reads lie in different banks.
    codes_to = shared + row * 32 + (half ^ row / 4 % 2) * 16;
    int token = threadIdx.x / 4, piece = threadIdx.x % 4, first = at.token_tile * Shape::kTokens;
    left = min(args.m - first, Shape::kTokens) - token;
    tokens = static_cast<const T*>(args.x) + (int64_t{first + token} * args.k + (at.k_step + begin) * 64 + piece * 8);
    tokens_to = shared + token * kTableStride + (piece ^ token % 2 * 4) * 16;
  }
  // Loads the next k step's codes, which is the thread block's so many-th; beyond the last one zeros.
  __device__ __forceinline__ void load_codes(unsigned index, unsigned count) {
    unsigned to = codes_to + Shape::codes(index);
    bool last = ++codes_step == count;
    int64_t on = last ? 32 - int64_t{count} * 32 : 32;
    if (last) codes_step = 0;
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      copy_or_zero(to + i * 4096, codes[i], index < count);
      codes[i] += on;
    }
  }
  // The same for the activations of the next half step.
  __device__ __forceinline__ void load_tokens(const MmaArgs& args, unsigned shared, unsigned index, int half, unsigned count) {
    unsigned to = (tokens_to ^ half * 64) + Shape::activations(index);
    int valid = index < count ? left : 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_or_zero(to + i * 64 * kTableStride, tokens + int64_t{i * 64} * args.k, i * 64 < valid);
    }
    tokens += 32;
    if (half == 1 && ++tokens_step == count) {
      tokens_step = 0;
      tokens -= int64_t{count} * 64;
    }
    copies_arrive(Shape::full(shared, index, half));
  }
};

// The scales of a row, by a thread that has it. Sums are kept in units of the latest scale, so that mma adds to them: in front
// of each k step they are multiplied by the one before over its own.
template <typename Shape>
struct WideScales {
  // Below this a scale counts as so large, since sums are divided by it. No sum of others notices.
  static constexpr float kSmallest = 1e-20f;
  unsigned at, place, step, word, group, to;
  float value, absmax, offset, scale;

  __device__ __forceinline__ WideScales(const MmaArgs& args, const MmaStep& first, unsigned begin)
      : step(begin), word(0), group(0), absmax(1.0f), offset(0.0f), scale(1.0f) {
    int r = threadIdx.x % Shape::kRows;
    int row = args.row_within(first.row_tile * (Shape::kRows / 16) + r / 16, r % 16);
    at = static_cast<unsigned>(row) * args.k_steps + first.k_step;
    place = args.place_first + row * args.place_pitch + first.k_step;
    // A thread reads those of its rows g and g + 8 of its m16 tiles at once.
    constexpr int kOfWarp = Shape::kRowTiles * 16;
    to = Shape::kRatios + (r / kOfWarp * kOfWarp + r % 8 * (Shape::kRowTiles * 2) + r % kOfWarp / 16 * 2 + r / 8 % 2) * 4;
    if (args.weight.absmax_8bit) {
      load_word(args);
      load_group(args, (place + step) >> (args.scale_shift + 8));
    }
  }
  __device__ __forceinline__ unsigned index(const MmaArgs& args) const { return (at + step) >> args.scale_shift; }
  // Loads the four codes among which is that of the next k step.
  __device__ __forceinline__ void load_word(const MmaArgs& args) {
    word = __ldg(reinterpret_cast<const unsigned*>(args.weight.absmax_8bit) + index(args) / 4);
  }
  __device__ __forceinline__ void load_group(const MmaArgs& args, unsigned of) {
    group = of;
    absmax = __ldg(args.weight.absmax + group);
    offset = __ldg(args.weight.absmax_offset + group * args.weight.offset_stride);
  }
  // Loads the scale of the next k step.
  __device__ __forceinline__ void load(const MmaArgs& args, const char* shared, unsigned count) {
    bool nested = args.weight.absmax_8bit;
    unsigned now = index(args), of = (place + step) >> (args.scale_shift + 8);
    value = *reinterpret_cast<const float*>(shared + Shape::kScaleCode + (word >> now % 4 * 8) % 256 * 4);
    if (!nested) value = __ldg(args.weight.absmax + now);
    if (nested && of != group) load_group(args, of);
    step = step + 1 == count ? 0 : step + 1;
    if (nested && index(args) / 4 != now / 4) load_word(args);
  }
  // Goes on to the scale that was loaded, or behind the last k step to one, and leaves what sums are multiplied by.
  __device__ __forceinline__ void advance(char* shared, unsigned index, unsigned count) {
    float next = nested_scale(value, absmax, offset);
    next = fabsf(next) < kSmallest ? kSmallest : next;
    next = index < count ? next : 1.0f;
    *reinterpret_cast<float*>(shared + to + index % 4 * Shape::kRatioBytes) = __fdividef(scale, next);
    scale = next;
  }
};

}  // namespace nf4
