// A gated activation in linear_wgmma's order: what stands between two products, and what would arrange it for the second.
#include "common.cuh"
#include "pipeline.cuh"

namespace nf4 {
namespace {

template <int kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == NF4_SILU) return x / (1.0f + __expf(-x));
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Two k. The activation is rounded before the multiplication, as models do it.
template <typename T, int kActivation>
__device__ __forceinline__ unsigned gated(unsigned gate, unsigned up) {
  float2 g = unpack2<T>(gate), u = unpack2<T>(up);
  g = unpack2<T>(pack2<T>(activated<kActivation>(g.x), activated<kActivation>(g.y)));
  return pack2<T>(g.x * u.x, g.y * u.y);
}

// One thread writes one 16-byte chunk. Tokens beyond m and k beyond the last are zeros.
template <typename T, int kActivation>
__global__ void gated_tiles(const T* gate_up, uint4* tiles, int m, int k_blocks, int padded_blocks, int tile,
                            int chunks) {
  let_next_start();
  wait_for_previous();
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= chunks) return;
  int chunk = at % 8, block = at / 8 % padded_blocks, token = at / 8 / padded_blocks;
  unsigned words[4] = {};
  if (token < m && block < k_blocks) {
    const unsigned* gate = reinterpret_cast<const unsigned*>(gate_up + (int64_t{token} * 2 * k_blocks + block) * 64) + chunk;
    const unsigned* up = gate + int64_t{k_blocks} * 32;
    unsigned gates[4], ups[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      gates[j] = load_fresh(gate + j * 8);
      ups[j] = load_fresh(up + j * 8);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = gated<T, kActivation>(gates[j], ups[j]);
  }
  int row = token % tile;
  int64_t first = (int64_t{token / tile} * padded_blocks + block) * tile;
  tiles[(first + row) * 8 + (chunk ^ row % 8)] = make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T, int kActivation>
cudaError_t launch(const void* gate_up, void* tiles, int64_t m, int64_t k, int tile, bool overlaps, cudaStream_t stream) {
  int64_t k_blocks = k / 64, padded_blocks = (k + 255) / 256 * 4;
  int64_t chunks = (m + tile - 1) / tile * tile * padded_blocks * 8;
  if (chunks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((chunks + 255) / 256));
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, gated_tiles<T, kActivation>, static_cast<const T*>(gate_up),
                            static_cast<uint4*>(tiles), static_cast<int>(m), static_cast<int>(k_blocks),
                            static_cast<int>(padded_blocks), tile, static_cast<int>(chunks));
}

}  // namespace
}  // namespace nf4

// gate_up [m, 2 k], dense: activation(its first k columns) * its last, into tiles (reference.py's arrange()) of so many
// rows. k: a multiple of 64. overlaps: the launch may begin before the one in front has ended (sm_90 on), whose stream's
// products may then read their weights likewise. Returns a cudaError_t.
NF4_EXPORT int nf4_cuda_gated_tiles(const void* gate_up, void* tiles, int64_t m, int64_t k, int32_t tile,
                                    int32_t activation, int32_t dtype, int32_t overlaps, void* stream) {
  if (k % 64 || tile <= 0 || dtype == NF4_FLOAT32) return cudaErrorInvalidValue;
  auto on = static_cast<cudaStream_t>(stream);
#define NF4_LAUNCH(T, ACTIVATION) return nf4::launch<T, ACTIVATION>(gate_up, tiles, m, k, tile, overlaps, on)
  if (activation == NF4_SILU) {
    if (dtype == NF4_FLOAT16) NF4_LAUNCH(__half, NF4_SILU);
    NF4_LAUNCH(__nv_bfloat16, NF4_SILU);
  }
  if (activation == NF4_GELU_TANH) {
    if (dtype == NF4_FLOAT16) NF4_LAUNCH(__half, NF4_GELU_TANH);
    NF4_LAUNCH(__nv_bfloat16, NF4_GELU_TANH);
  }
#undef NF4_LAUNCH
  return cudaErrorInvalidValue;
}
