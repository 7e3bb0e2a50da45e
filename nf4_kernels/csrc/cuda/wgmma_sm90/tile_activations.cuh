// The launch in front of linear_wgmma.cuh's: x [m, k] becomes tiles of shared memory's layout, so that one bulk copy loads a
// stage. The order of k within a tile is linear_wgmma.cuh's.
#pragma once

#include "../clock.cuh"
#include "../common.cuh"
#include "../pipeline.cuh"

namespace nf4 {

// A thread writes one 16-byte chunk. Tokens from m on and k beyond the last are zeros. (16-byte reads and an exchange
// between lanes are no faster.)
template <typename T>
__global__ void tile_activations(const T* x, uint4* tiles, int m, int k_blocks, int padded_blocks, int tokens,
                                 int chunks, uint64_t* clock) {
  launch_dependents();
  grid_dependency_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) clock_start(clock);
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= chunks) return;
  int chunk = at % 8, block = at / 8 % padded_blocks, token = at / 8 / padded_blocks;
  uint4 words = make_uint4(0, 0, 0, 0);
  if (token < m && block < k_blocks) {
    const unsigned* from = reinterpret_cast<const unsigned*>(x + (int64_t{token} * k_blocks + block) * 64) + chunk;
    // This is no __ldg, since the kernel in front may write them after this one has started.
    words = make_uint4(__ldcg(from), __ldcg(from + 8), __ldcg(from + 16), __ldcg(from + 24));
  }
  int row = token % tokens;
  int64_t tile = int64_t{token / tokens} * padded_blocks + block;
  tiles[(tile * tokens + row) * 8 + (chunk ^ row % 8)] = words;
}

// The same for activations that are normalised first: a thread block does one token and keeps its chunks in registers.
constexpr int kNormThreads = 512;
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    normalise_and_tile_activations(const T* x, const T* weight, float eps, uint4* tiles, int m, int k_blocks,
                                   int padded_blocks, int tokens, uint64_t* clock) {
  constexpr int kChunks = NF4_NORM_K / 8 / kNormThreads;
  launch_dependents();
  int token = blockIdx.x, thread = threadIdx.x;
  auto word_of = [&](const T* row, int i) {
    int at = thread + i * kNormThreads;
    return reinterpret_cast<const unsigned*>(row + at / 8 * 64) + at % 8;
  };
  unsigned words[kChunks][4] = {}, weights[kChunks][4] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (token >= m || thread + i * kNormThreads >= k_blocks * 8) break;
    const unsigned* from = word_of(weight, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[i][j] = __ldg(from + j * 8);
  }
  grid_dependency_wait();
  if (token == 0 && thread == 0) clock_start(clock);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (token >= m || thread + i * kNormThreads >= k_blocks * 8) break;
    const unsigned* from = word_of(x + int64_t{token} * k_blocks * 64, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[i][j] = load_fresh(from + j * 8);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 pair = unpack2<T>(words[i][j]);
      squares += pair.x * pair.x + pair.y * pair.y;
    }
  }
  __shared__ float warps[kNormThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (thread % 32 == 0) warps[thread / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) squares += warps[i];
  float by = rsqrtf(squares / (k_blocks * 64) + eps);
  int row = token % tokens;
  int64_t tile = int64_t{token / tokens} * padded_blocks;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    int at = thread + i * kNormThreads, block = at / 8;
    if (block >= padded_blocks) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Models round before and after they multiply by the norm's weight.
      float2 pair = unpack2<T>(words[i][j]), scale = unpack2<T>(weights[i][j]);
      pair = unpack2<T>(pack2<T>(pair.x * by, pair.y * by));
      words[i][j] = pack2<T>(pair.x * scale.x, pair.y * scale.y);
    }
    tiles[((tile + block) * tokens + row) * 8 + (at % 8 ^ row % 8)] =
        make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
  }
}

}  // namespace nf4
