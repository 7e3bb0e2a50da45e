// A mixture's router with its GEMM in one launch, for few tokens on Hopper and later.
//
// A cluster has 8 tokens, and each of its thread blocks 16 experts, whose weights its warps hold in registers as A operands;
// they are there before the kernel in front has ended. A warp has 256 k. The block adds up its warps' sums in a fixed order,
// rounds the logits to the activations' type, as a GEMM of its own would, and hands those of each token to one block of the
// cluster, where a warp chooses the token's experts.
#include <stdint.h>

#include "device.cuh"
#include "pipeline.cuh"
#include "router.cuh"
#include "rows/activations.cuh"
#include "rows/sync.cuh"

namespace nf4 {
namespace {

constexpr int kTokens = 8, kExperts = 16, kMostWidth = 128;
constexpr int kChunks = 4;  // 64 k each, of a warp
constexpr int kMostWarps = 16;

struct RouterArgs {
  const void* x;       // [tokens][hidden]
  const void* weight;  // [width][hidden]; constant
  Routes routes;
  int tokens, hidden, width;
};

[[maybe_unused]] __device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Stores to another block of the cluster, whose barrier counts the bytes once they have landed.
[[maybe_unused]] __device__ __forceinline__ void send_float(unsigned address, float value, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value),
               "r"(barrier)
               : "memory");
#endif
}

// A load of constant weights that stays in front of the wait for the kernel before: __ldg would be moved behind it.
[[maybe_unused]] __device__ __forceinline__ uint4 load_early(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// The logits of 16 experts and 8 tokens over a warp's 256 k: lane (g, t) has experts g and g + 8 of tokens 2t and 2t + 1. Within
// 64 k, lane t of a quad takes 16t..16t+15 of both operands. before_x() runs between the operands' loads.
template <typename T, typename BeforeX>
__device__ __forceinline__ float4 multiply(const RouterArgs& args, int first_expert, int first_token, BeforeX before_x) {
  int lane = threadIdx.x % 32, g = lane / 4, k = threadIdx.x / 32 * (kChunks * 64) + lane % 4 * 16;
  uint4 a[kChunks][2][2], b[kChunks][1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int expert = min(first_expert + g + half * 8, args.width - 1);
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const T*>(args.weight) + int64_t{expert} * args.hidden + k);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      a[i][half][0] = load_early(from + i * 8);
      a[i][half][1] = load_early(from + i * 8 + 1);
    }
  }
  before_x();
  int token = min(first_token + g, args.tokens - 1);
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) + int64_t{token} * args.hidden + k);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    // These are no __ldg, since the kernel in front may write x after this one has started.
    b[i][0][0] = from[i * 8];
    b[i][0][1] = from[i * 8 + 1];
  }
  float sums[kChunks][1][4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 &upper = a[i][0][step / 2], &lower = a[i][1][step / 2];
      unsigned operand[4] = {step % 2 ? upper.z : upper.x, step % 2 ? lower.z : lower.x, step % 2 ? upper.w : upper.y,
                             step % 2 ? lower.w : lower.y};
      const uint4& four = b[i][0][step / 2];
      mma<T>(sums[i][0], operand, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y, sums[i][0]);
    }
  }
  float sum[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] = (sums[0][0][j] + sums[1][0][j]) + (sums[2][0][j] + sums[3][0][j]);
  return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

template <typename T>
__global__ void __launch_bounds__(kMostWarps * 32, 1) route_linear(const __grid_constant__ RouterArgs args) {
#if __CUDA_ARCH__ >= 900
  __shared__ float sums[kMostWarps][kExperts][kTokens], logits[kTokens][kMostWidth];
  __shared__ __align__(8) uint64_t barrier;
  int cluster = (args.width + kExperts - 1) / kExperts, rank = static_cast<int>(cluster_rank());
  int first_token = static_cast<int>(blockIdx.x) / cluster * kTokens, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int warps = blockDim.x / 32, slots = (kTokens - rank + cluster - 1) / cluster;  // tokens of this block
  launch_dependents();
  unsigned all_there = shared_address(&barrier);
  if (threadIdx.x == 0) {
    barrier_init(all_there, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(all_there, slots * cluster * kExperts * 4);
  }
  __syncwarp();
  // Blocks must have set up their barriers before another one stores into them.
  cluster_arrive();
  float4 sum = multiply<T>(args, rank * kExperts, first_token, [] { grid_dependency_wait(); });
  float* mine = &sums[warp][lane / 4][lane % 4 * 2];
  *reinterpret_cast<float2*>(mine) = make_float2(sum.x, sum.y);
  *reinterpret_cast<float2*>(mine + 8 * kTokens) = make_float2(sum.z, sum.w);
  __syncthreads();
  cluster_wait();
  for (int at = threadIdx.x; at < kExperts * kTokens; at += blockDim.x) {
    int expert = at / kTokens, token = at % kTokens;
    float logit = 0.0f;
#pragma unroll 8
    for (int i = 0; i < warps; ++i) logit += sums[i][expert][token];
    unsigned there = shared_address(&logits[token / cluster][rank * kExperts + expert]);
    send_float(remote_address(there, token % cluster), to_float(from_float<T>(logit)),
               remote_address(all_there, token % cluster));
  }
  if (warp >= slots) return;
  barrier_wait(all_there, 0);
  for (int slot = warp; slot < slots; slot += warps) {
    int token = first_token + slot * cluster + rank;
    if (token >= args.tokens) break;
    float of_lane[kMostWidth / 32];
#pragma unroll
    for (int i = 0; i < kMostWidth / 32; ++i) of_lane[i] = logits[slot][lane + i * 32];
    route_row<kMostWidth / 32>(args.routes, token, args.width, of_lane);
  }
#endif
}

template <typename T>
cudaError_t launch(const RouterArgs& args, void* stream) {
  int cluster = (args.width + kExperts - 1) / kExperts, blocks = (args.tokens + kTokens - 1) / kTokens * cluster;
  LaunchShape shape{dim3(static_cast<unsigned>(blocks)), args.hidden / (kChunks * 64) * 32, 0, cluster};
  return launch_kernel(route_linear<T>, shape, stream, args);
}

}  // namespace
}  // namespace nf4

// As nf4_cuda_route() with logits = x [tokens, hidden] times weight [width, hidden], both of dtype (float16 or bfloat16), dense
// and aligned to 16 bytes; the logits are rounded to dtype. weight is read before the kernel in front has ended, so nothing
// may write it. From sm_90 on; cudaErrorInvalidValue for a hidden size that is no multiple of 256 up to 4096, for a width
// beyond 128, or for a k outside of 1 ... width or beyond 32.
NF4_EXPORT int nf4_cuda_route_linear(const void* x, const void* weight, float* weights, int32_t* experts, int64_t tokens,
                                     int32_t hidden, int32_t width, int32_t k, int32_t dtype, int32_t normalised,
                                     int32_t rounded, void* stream) {
  if (hidden < 256 || hidden > 256 * nf4::kMostWarps || hidden % 256 || tokens < 1 || tokens > 1 << 20) {
    return cudaErrorInvalidValue;
  }
  if (width < 1 || width > nf4::kMostWidth || k < 1 || k > width || k > 32 || dtype == NF4_FLOAT32) {
    return cudaErrorInvalidValue;
  }
  nf4::RouterArgs args{x, weight, {weights, experts, k, normalised != 0, rounded}, static_cast<int>(tokens), hidden, width};
  return dtype == NF4_FLOAT16 ? nf4::launch<__half>(args, stream) : nf4::launch<__nv_bfloat16>(args, stream);
}
