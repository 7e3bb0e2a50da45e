// A token's queries as operands of matrix instructions, and its new key and value; both with norm and rotary embedding.
#pragma once

#include "pages.cuh"

namespace nf4 {
namespace attention {

constexpr int kSteps = kDim / 16;  // matrix instructions for a score
constexpr int kHeads = 8;          // query heads of a launch's key head, at most: the columns of a matrix instruction

// Two neighbouring elements of each half of a head, which the rotary embedding takes together.
struct Quad {
  float2 low, high;
};

template <typename T>
__device__ __forceinline__ unsigned fresh_pair(const T* from) {
  return load_fresh(reinterpret_cast<const unsigned*>(from));
}

template <typename T>
__device__ __forceinline__ Quad fresh_quad(const T* row, int column) {
  return {unpack2<T>(fresh_pair(row + column)), unpack2<T>(fresh_pair(row + column + kDim / 2))};
}

// The parameters are written by no launch.
template <typename T>
__device__ __forceinline__ Quad norm_weights(const void* weights, int column, float offset) {
  const T* row = static_cast<const T*>(weights);
  float2 low = unpack2<T>(*reinterpret_cast<const unsigned*>(row + column));
  float2 high = unpack2<T>(*reinterpret_cast<const unsigned*>(row + column + kDim / 2));
  return {{low.x + offset, low.y + offset}, {high.x + offset, high.y + offset}};
}

__device__ __forceinline__ float square_sum(const Quad& x) {
  return x.low.x * x.low.x + x.low.y * x.low.y + x.high.x * x.high.x + x.high.y * x.high.y;
}

__device__ __forceinline__ void multiply(Quad* x, const Quad& by) {
  x->low.x *= by.low.x, x->low.y *= by.low.y, x->high.x *= by.high.x, x->high.y *= by.high.y;
}

__device__ __forceinline__ Quad rotated(const Quad& x, const Quad& cos, const Quad& sin) {
  return {{x.low.x * cos.low.x - x.high.x * sin.low.x, x.low.y * cos.low.y - x.high.y * sin.low.y},
          {x.high.x * cos.high.x + x.low.x * sin.high.x, x.high.y * cos.high.y + x.low.y * sin.high.y}};
}

// The right operands of the scores' matrix instructions: queries of up to 8 heads, transposed. A lane holds elements of head
// lane / 4; those of heads behind the group are zeros.
template <typename T>
__device__ __forceinline__ void load_queries(unsigned (&to)[kSteps][2], const Nf4DecodeAttention& args, int row, int first) {
  int lane = threadIdx.x % 32, head = lane / 4, own = lane % 4 * 2;
  bool real = head < args.group;
  const T* from = static_cast<const T*>(args.query) + row * args.query_token + (first + (real ? head : 0)) * args.query_head;
  Quad x[kSteps];
  // Of steps s and s + 4, whose elements the rotary embedding takes together: two pairs each.
#pragma unroll
  for (int i = 0; i < kSteps; ++i) x[i] = fresh_quad(from, i / 2 * 16 + i % 2 * 8 + own);
  if (args.cosines) {
    float scale = 1.0f;
    if (args.query_norm) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) sum += square_sum(x[i]);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      scale = rsqrtf(sum / kDim + args.eps);
    }
    const T* cosines = static_cast<const T*>(args.cosines) + int64_t{row} * kDim;
    const T* sines = static_cast<const T*>(args.sines) + int64_t{row} * kDim;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int column = i / 2 * 16 + i % 2 * 8 + own;
      if (args.query_norm) multiply(&x[i], norm_weights<T>(args.query_norm, column, args.offset));
      x[i] = rotated(x[i], fresh_quad(cosines, column), fresh_quad(sines, column));
      multiply(&x[i], {{scale, scale}, {scale, scale}});
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    to[i / 2][i % 2] = real ? pack2<T>(x[i].low.x, x[i].low.y) : 0;
    to[i / 2 + kSteps / 2][i % 2] = real ? pack2<T>(x[i].high.x, x[i].high.y) : 0;
  }
}

// A token's key or value of one head in a warp: elements 2 lane, 2 lane + 1, and those of the other half.
struct NewRow {
  unsigned low, high;

  // Writes it to a row of the cache.
  template <typename T>
  __device__ __forceinline__ void store(T* row) const {
    int column = threadIdx.x % 32 * 2;
    *reinterpret_cast<unsigned*>(row + column) = low;
    *reinterpret_cast<unsigned*>(row + column + kDim / 2) = high;
  }

  // Writes it to a row of a KV block in shared memory.
  __device__ __forceinline__ void put(unsigned block, unsigned row) const {
    unsigned lane = threadIdx.x % 32, inside = lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(block + place_of(row, lane / 4) + inside), "r"(low) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(block + place_of(row, lane / 4 + 8) + inside), "r"(high) : "memory");
  }
};

template <typename T>
__device__ __forceinline__ NewRow load_new_value(const T* from) {
  int column = threadIdx.x % 32 * 2;
  return {fresh_pair(from + column), fresh_pair(from + column + kDim / 2)};
}

template <typename T>
__device__ __forceinline__ NewRow load_new_key(const Nf4DecodeAttention& args, const T* from, int row) {
  if (!args.cosines) return load_new_value(from);
  int column = threadIdx.x % 32 * 2;
  Quad x = fresh_quad(from, column);
  Quad cos = fresh_quad(static_cast<const T*>(args.cosines) + int64_t{row} * kDim, column);
  Quad sin = fresh_quad(static_cast<const T*>(args.sines) + int64_t{row} * kDim, column);
  float scale = 1.0f;
  if (args.key_norm) {
    float sum = square_sum(x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    scale = rsqrtf(sum / kDim + args.eps);
    multiply(&x, norm_weights<T>(args.key_norm, column, args.offset));
  }
  x = rotated(x, cos, sin);
  return {pack2<T>(x.low.x * scale, x.low.y * scale), pack2<T>(x.high.x * scale, x.high.y * scale)};
}

}  // namespace attention
}  // namespace nf4
