// What a thread block does with its warps' sums: it adds them up, and the last one of a sequence reduces its parts.
#pragma once

#include "sums.cuh"

namespace nf4 {
namespace attention {

constexpr int kPitch = kDim + 4;  // floats from head to head in shared memory, so that heads begin in different banks
constexpr int kMostParts = 16;    // of a group of parts that are reduced together
constexpr int kInFlight = 8;      // parts whose sums are loaded at a time

// A thread block's sums in shared memory, by warp.
template <int kWarps>
struct Shared {
  float values[kWarps][kHeads][kPitch];
  float greatest[kWarps][kHeads], weights[kWarps][kHeads];
};

// A warp's sums of one head: elements 4 lane to 4 lane + 3.
struct HeadSums {
  float4 values;
  float greatest, weight;
};

__device__ __forceinline__ void add_scaled(float4* to, const float4& values, float by) {
  to->x += values.x * by, to->y += values.y * by, to->z += values.z * by, to->w += values.w * by;
}

// Puts a warp's sums into shared memory.
template <int kWarps>
__device__ __forceinline__ void put_sums(Shared<kWarps>* shared, Sums& sums) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums.weights[i] += __shfl_xor_sync(~0u, sums.weights[i], step);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      float* row = shared->values[warp][head + i];
      row[16 * j + lane / 4] = sums.values[j][i];
      row[16 * j + lane / 4 + 8] = sums.values[j][i + 2];
    }
    if (lane < 4) {
      shared->greatest[warp][head + i] = sums.greatest[i];
      shared->weights[warp][head + i] = sums.weights[i];
    }
  }
}

// All warps' sums of a head together.
template <int kWarps>
__device__ __forceinline__ HeadSums block_sums(const Shared<kWarps>& shared, int head) {
  HeadSums total{{0.0f, 0.0f, 0.0f, 0.0f}, kLeast, 0.0f};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total.greatest = fmaxf(total.greatest, shared.greatest[warp][head]);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    float by = exp2_of(shared.greatest[warp][head] - total.greatest);
    total.weight += shared.weights[warp][head] * by;
    add_scaled(&total.values, *reinterpret_cast<const float4*>(&shared.values[warp][head][threadIdx.x % 32 * 4]), by);
  }
  return total;
}

// Stores a head's result, [heads][kDim] of a token or tiled (nf4_kernels/reference.py, tile_activations()).
template <typename T>
__device__ __forceinline__ void store_result(const Nf4DecodeAttention& args, int row, int head, const HeadSums& sums) {
  float by = 1.0f / sums.weight;
  unsigned low = pack2<T>(sums.values.x * by, sums.values.y * by), high = pack2<T>(sums.values.z * by, sums.values.w * by);
  int column = head * kDim + threadIdx.x % 32 * 4;
  int64_t width = int64_t{args.kv_heads} * args.group * kDim;
  T* out = static_cast<T*>(args.out);
  if (args.tile_rows == 0) {
    *reinterpret_cast<uint2*>(out + row * width + column) = make_uint2(low, high);
    return;
  }
  int in_tile = row % args.tile_rows, word = column % 64 / 2;
  T* to = out + row / args.tile_rows * (args.tile_rows * width) + column / 64 * (args.tile_rows * 64) + in_tile * 64;
#pragma unroll
  for (int i = 0; i < 2; ++i, ++word) {
    int chunk = word % 8 ^ in_tile % 8;
    *reinterpret_cast<unsigned*>(to + (chunk * 4 + word / 8) * 2) = i ? high : low;
  }
}

__device__ __forceinline__ void put_part(const Nf4DecodeAttention& args, int64_t place, const HeadSums& sums) {
  int lane = threadIdx.x % 32;
  *reinterpret_cast<float4*>(args.sums + place * kDim + lane * 4) = sums.values;
  if (lane == 0) *reinterpret_cast<float2*>(args.weights + place * 2) = make_float2(sums.greatest, sums.weight);
}

// The sums of every step-th of `parts` parts, at most 32, in their order. place: of the first one; pitch: places from one to
// the next.
__device__ __forceinline__ HeadSums reduced(const Nf4DecodeAttention& args, int64_t place, int parts, int64_t pitch) {
  int lane = threadIdx.x % 32;
  const float* values = args.sums + place * kDim + lane * 4;
  float2 own = make_float2(kLeast, 0.0f);
  if (lane < parts) own = load_fresh(reinterpret_cast<const float2*>(args.weights + (place + lane * pitch) * 2));
  HeadSums total{{0.0f, 0.0f, 0.0f, 0.0f}, own.x, 0.0f};
#pragma unroll 1
  for (int part = 0; part < parts; part += kInFlight) {
    float4 loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      int at = min(part + i, parts - 1);
      loaded[i] = load_fresh(reinterpret_cast<const float4*>(values + at * pitch * kDim));
    }
    if (part == 0) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        total.greatest = fmaxf(total.greatest, __shfl_xor_sync(~0u, total.greatest, step));
      }
      own.x = exp2_of(own.x - total.greatest);
      total.weight = own.x * own.y;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) total.weight += __shfl_xor_sync(~0u, total.weight, step);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      float by = __shfl_sync(~0u, own.x, (part + i) % 32);
      if (part + i < parts) add_scaled(&total.values, loaded[i], by);
    }
  }
  return total;
}

// Whether this thread block is the last of `count` to come here; then the counter is 0 again, and what the others have
// written before can be read.
__device__ __forceinline__ bool is_last(int32_t* counter, int count) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == count - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  bool found = last;
  __threadfence();
  return found;
}

// Writes a sequence's result; of a sequence in parts leaves this part's sums, which are reduced by the thread block that
// ends last. As many parts as kMostParts are a group. The last part of a group to end reduces the group, and the last group
// to end reduces the groups, of which there are 32 at most.
template <typename T, int kWarps>
__device__ __forceinline__ void finish(const Nf4DecodeAttention& args, const Shared<kWarps>& shared, int item, int first,
                                       int parts, int row, int key_head) {
  int warp = threadIdx.x / 32, kv_heads = args.kv_heads, group = args.group;
  int64_t pitch = int64_t{kv_heads} * group;
  auto place = [&](int of) { return (int64_t{of} * kv_heads + key_head) * group; };
  for (int head = warp; head < group; head += kWarps) {
    HeadSums sums = block_sums(shared, head);
    if (parts == 1) {
      store_result<T>(args, row, key_head * group + head, sums);
    } else {
      put_part(args, place(item) + head, sums);
    }
  }
  if (parts == 1) return;
  int groups = parts, step = 1;
  if (parts > kMostParts) {
    groups = (parts + kMostParts - 1) / kMostParts, step = kMostParts;
    int begun = first + (item - first) / kMostParts * kMostParts, members = min(kMostParts, first + parts - begun);
    if (members > 1) {
      // A sequence's own counter is at its first part; those of its groups are at their second parts.
      if (!is_last(args.arrived + (begun + 1) * kv_heads + key_head, members)) return;
      for (int head = warp; head < group; head += kWarps) {
        HeadSums sums = reduced(args, place(begun) + head, members, pitch);
        put_part(args, place(begun) + head, sums);
      }
    }
  }
  if (!is_last(args.arrived + first * kv_heads + key_head, groups)) return;
  for (int head = warp; head < group; head += kWarps) {
    store_result<T>(args, row, key_head * group + head, reduced(args, place(first) + head, groups, step * pitch));
  }
}

}  // namespace attention
}  // namespace nf4
