// The gated delta rule with its causal convolution, norm and gate in one launch. A thread block has one value head of one
// sequence: 256 threads hold its state, 128 x 128 float32, in registers, 16 rows of four columns each, and go through the
// tokens. Decode steps are bound by the bytes of the states, which are read and written once.
#include "common.cuh"
#include "device.cuh"
#include "gated_delta.h"
#include "pipeline.cuh"

namespace nf4 {

__device__ __forceinline__ float to_float(float value) { return value; }

namespace {

constexpr int kDim = 128;            // of a key and of a value; smaller ones are padded with zeros
constexpr int kTaps = 4;             // of the convolution
constexpr int kWarps = 8;            // each also normalises one token of a tile
constexpr int kRows = kDim / kWarps; // of the state in a warp
constexpr float kL2Eps = 1e-6f;

struct Shared {
  float q[kWarps][kDim], k[kWarps][kDim], v[kWarps][kDim];  // of a tile's tokens
  float decay[kWarps], beta[kWarps];
  float sums[2][2][kWarps][kDim];  // [of odd and even tokens][k S and q S][warp]: over the warp's rows
  float qk[2][kWarps];
  bool last;
};

template <typename T>
__device__ __forceinline__ float4 load4(const T* from) {
  uint2 pairs = *reinterpret_cast<const uint2*>(from);
  float2 low = unpack2<T>(pairs.x), high = unpack2<T>(pairs.y);
  return {low.x, low.y, high.x, high.y};
}
template <>
__device__ __forceinline__ float4 load4<float>(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

template <typename T>
__device__ __forceinline__ void store4(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = {pack2<T>(v.x, v.y), pack2<T>(v.z, v.w)};
}
template <>
__device__ __forceinline__ void store4<float>(float* to, float4 v) {
  *reinterpret_cast<float4*>(to) = v;
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

// A parameter that is float32 or of T.
template <typename T>
__device__ __forceinline__ float parameter(const void* from, int64_t i, int32_t dtype) {
  return dtype == NF4_FLOAT32 ? static_cast<const float*>(from)[i] : to_float(static_cast<const T*>(from)[i]);
}

template <typename T>
__device__ __forceinline__ float4 parameter4(const void* from, int64_t i, int32_t dtype) {
  return dtype == NF4_FLOAT32 ? load4(static_cast<const float*>(from) + i) : load4(static_cast<const T*>(from) + i);
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

__device__ __forceinline__ void fma4(float4& sum, float factor, float4 v) {
  sum.x = fmaf(factor, v.x, sum.x);
  sum.y = fmaf(factor, v.y, sum.y);
  sum.z = fmaf(factor, v.z, sum.z);
  sum.w = fmaf(factor, v.w, sum.w);
}

// Where a block's sequence and heads lie.
template <typename T>
struct Place {
  const T* qkv;         // of the sequence's first token
  const T* conv_state;  // of its slot; null where it begins with zeros
  int64_t first;        // row of its first token
  int tokens;
  int key_head, value_head;
};

// Four neighbouring channels of token t after convolution and SiLU, rounded.
template <typename T>
__device__ __forceinline__ float4 convolve(const Nf4GatedDelta& p, const Place<T>& at, int t, int64_t channel) {
  float4 taps[4], sum{};
#pragma unroll
  for (int c = 0; c < 4; ++c) taps[c] = parameter4<T>(p.conv_weight, (channel + c) * kTaps, p.conv_dtype);
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    int source = t - (kTaps - 1) + j;
    float4 x{};
    if (source >= 0) {
      x = load4(at.qkv + source * p.qkv_stride + channel);
    } else if (at.conv_state) {
      const T* old = at.conv_state + channel * (kTaps - 1) + (kTaps - 1) + source;
      x = {to_float(old[0]), to_float(old[kTaps - 1]), to_float(old[2 * (kTaps - 1)]), to_float(old[3 * (kTaps - 1)])};
    }
    auto tap = [&](int c) { return j == 0 ? taps[c].x : j == 1 ? taps[c].y : j == 2 ? taps[c].z : taps[c].w; };
    sum = {fmaf(tap(0), x.x, sum.x), fmaf(tap(1), x.y, sum.y), fmaf(tap(2), x.z, sum.z), fmaf(tap(3), x.w, sum.w)};
  }
  return {rounded<T>(silu(sum.x)), rounded<T>(silu(sum.y)), rounded<T>(silu(sum.z)), rounded<T>(silu(sum.w))};
}

// q, k and v of the tile's tokens from t0 on, normalised, and their gates: a warp has one of them at a time.
template <typename T>
__device__ __forceinline__ void prepare(Shared& shared, const Nf4GatedDelta& p, const Place<T>& at, int t0, int count) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 4;
  if (warp == kWarps - 1 && lane < count) {
    int64_t row = at.first + t0 + lane;
    int head = at.value_head;
    float rate = to_float(static_cast<const T*>(p.a)[row * p.a_stride + head]) + p.dt_bias[head];
    // As torch's softplus.
    rate = rate > 20.0f ? rate : log1pf(expf(rate));
    shared.decay[lane] = expf(-expf(p.a_log[head]) * rate);
    shared.beta[lane] = 1.0f / (1.0f + expf(-to_float(static_cast<const T*>(p.b)[row * p.b_stride + head])));
  }
  for (int task = warp; task < 3 * count; task += kWarps) {
    int t = task / 3, part = task % 3;
    int dim = part < 2 ? p.key_dim : p.value_dim;
    int64_t first = part < 2 ? static_cast<int64_t>(part * p.key_heads + at.key_head) * dim
                             : static_cast<int64_t>(2) * p.key_heads * p.key_dim + at.value_head * dim;
    float4 x{};
    if (column < dim) x = convolve(p, at, t0 + t, first + column);
    float scale = 1.0f;
    if (part < 2) {
      scale = rsqrtf(sum_of_warp(dot4(x, x)) + kL2Eps);
      if (part == 0) scale *= rsqrtf(static_cast<float>(dim));
    }
    float* to = part == 0 ? shared.q[t] : part == 1 ? shared.k[t] : shared.v[t];
    store4(to + column, float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale});
  }
}

// Advances the state by token t of the tile; this thread's four columns of out come back.
__device__ __forceinline__ float4 advance(Shared& shared, float4 (&state)[kRows], int t, int odd) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 4;
  const float4* k4 = reinterpret_cast<const float4*>(shared.k[t] + warp * kRows);
  const float4* q4 = reinterpret_cast<const float4*>(shared.q[t] + warp * kRows);
  float4 ks{}, qs{};
  float qk = 0;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    float4 k = k4[i], q = q4[i];
    qk += dot4(q, k);
    fma4(ks, k.x, state[4 * i]), fma4(qs, q.x, state[4 * i]);
    fma4(ks, k.y, state[4 * i + 1]), fma4(qs, q.y, state[4 * i + 1]);
    fma4(ks, k.z, state[4 * i + 2]), fma4(qs, q.z, state[4 * i + 2]);
    fma4(ks, k.w, state[4 * i + 3]), fma4(qs, q.w, state[4 * i + 3]);
  }
  store4(&shared.sums[odd][0][warp][column], ks);
  store4(&shared.sums[odd][1][warp][column], qs);
  if (lane == 0) shared.qk[odd][warp] = qk;
  __syncthreads();
  float4 read{};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) fma4(read, 1.0f, load4(&shared.sums[odd][0][w][column]));
  float4 v = load4(&shared.v[t][column]);
  float decay = shared.decay[t], beta = shared.beta[t];
  float4 delta = {beta * (v.x - decay * read.x), beta * (v.y - decay * read.y), beta * (v.z - decay * read.z),
                  beta * (v.w - decay * read.w)};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float4 kept = {decay * state[i].x, decay * state[i].y, decay * state[i].z, decay * state[i].w};
    fma4(kept, shared.k[t][warp * kRows + i], delta);
    state[i] = kept;
  }
  // Only the warp that normalises this token needs the output: q (decay S + k delta).
  float4 out{};
  if (warp == t) {
    qk = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      fma4(out, decay, load4(&shared.sums[odd][1][w][column]));
      qk += shared.qk[odd][w];
    }
    fma4(out, qk, delta);
  }
  return out;
}

// The gated norm of one token's head, rounded where transformers rounds; gate: four columns of z.
template <typename T>
__device__ __forceinline__ void normalise(const Nf4GatedDelta& p, float4 o, float4 gate, int64_t row, int head) {
  int column = threadIdx.x % 32 * 4;
  o = {rounded<T>(o.x), rounded<T>(o.y), rounded<T>(o.z), rounded<T>(o.w)};
  float scale = rsqrtf(sum_of_warp(dot4(o, o)) / p.value_dim + p.eps);
  if (column >= p.value_dim) return;
  float4 weight = parameter4<T>(p.norm_weight, column, p.norm_dtype);
  auto gated = [&](float value, float w, float z) {
    float product = w * rounded<T>(value * scale);
    return (p.norm_dtype == NF4_FLOAT32 ? product : rounded<T>(product)) * silu(z);
  };
  float4 result = {gated(o.x, weight.x, gate.x), gated(o.y, weight.y, gate.y), gated(o.z, weight.z, gate.z),
                   gated(o.w, weight.w, gate.w)};
  int64_t width = static_cast<int64_t>(p.value_heads) * p.value_dim;
  store4(static_cast<T*>(p.out) + row * width + head * p.value_dim + column, result);
}

// Moves the latest inputs of `dim` channels into the slot's convolution state, one channel a thread.
template <typename T>
__device__ __forceinline__ void shift(const Nf4GatedDelta& p, const Place<T>& at, T* conv_state, int64_t first, int dim,
                                      int thread) {
  if (thread < 0 || thread >= dim) return;
  int64_t channel = first + thread;
  T latest[kTaps - 1];
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    int source = at.tokens - (kTaps - 1) + j;
    if (source >= 0) {
      latest[j] = at.qkv[source * p.qkv_stride + channel];
    } else {
      latest[j] = at.conv_state ? at.conv_state[channel * (kTaps - 1) + (kTaps - 1) + source] : from_float<T>(0.0f);
    }
  }
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) conv_state[channel * (kTaps - 1) + j] = latest[j];
}

template <typename T, typename State, bool kWhole>
__global__ void __launch_bounds__(kWarps * 32, 2) gated_delta(const __grid_constant__ Nf4GatedDelta p) {
#if __CUDA_ARCH__ >= 800
  __shared__ Shared shared;
  launch_dependents();
  grid_dependency_wait();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 4;
  int sequence = blockIdx.y, slot = p.slots[sequence];
  Place<T> at;
  at.value_head = blockIdx.x;
  int group = p.value_heads / p.key_heads;
  at.key_head = at.value_head / group;
  at.first = p.starts ? p.starts[sequence] : sequence;
  at.tokens = p.starts ? p.starts[sequence + 1] - static_cast<int>(at.first) : 1;
  if (slot < 0) {
    int64_t width = static_cast<int64_t>(p.value_heads) * p.value_dim;
    for (int t = warp; t < at.tokens && column < p.value_dim; t += kWarps) {
      store4(static_cast<T*>(p.out) + (at.first + t) * width + at.value_head * p.value_dim + column, float4{});
    }
    return;
  }
  if (at.tokens <= 0) return;
  bool continues = !p.has_state || p.has_state[sequence];
  T* conv_state = static_cast<T*>(p.conv_state) + slot * p.conv_slot;
  at.conv_state = continues ? conv_state : nullptr;
  at.qkv = static_cast<const T*>(p.qkv) + at.first * p.qkv_stride;

  int64_t head_elements = static_cast<int64_t>(p.key_dim) * p.value_dim;
  State* pool = static_cast<State*>(p.state) + slot * p.state_slot + at.value_head * head_elements;
  auto inside = [&](int row) { return kWhole || (row < p.key_dim && column < p.value_dim); };
  auto place = [&](int row) { return pool + row * (kWhole ? kDim : p.value_dim) + column; };
  float4 state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int row = warp * kRows + i;
    state[i] = continues && inside(row) ? load4(place(row)) : float4{};
  }

  for (int t0 = 0; t0 < at.tokens; t0 += kWarps) {
    int count = min(kWarps, at.tokens - t0);
    int64_t row = at.first + t0 + warp;
    float4 gate{}, mine{};
    if (warp < count && column < p.value_dim) {
      gate = load4(static_cast<const T*>(p.z) + row * p.z_stride + at.value_head * p.value_dim + column);
    }
    if (t0) __syncthreads();
    prepare(shared, p, at, t0, count);
    __syncthreads();
    if (t0 == 0 && threadIdx.x == 0 && group > 1) {
      // The blocks of a key head read its channels' convolution state; the last to have done so moves it.
      __threadfence();
      unsigned* counter = p.counters + static_cast<int64_t>(sequence) * p.key_heads + at.key_head;
      shared.last = atomicInc(counter, group - 1) == static_cast<unsigned>(group - 1);
    }
    for (int t = 0; t < count; ++t) {
      float4 out = advance(shared, state, t, t & 1);
      if (warp == t) mine = out;
    }
    if (t0 + count == at.tokens) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        int r = warp * kRows + i;
        if (inside(r)) store4(place(r), state[i]);
      }
    }
    if (warp < count) normalise<T>(p, mine, gate, row, at.value_head);
  }
  // advance() has a barrier behind the reads of the convolution state and the atomic.
  int keys = p.key_heads * p.key_dim, thread = threadIdx.x;
  shift(p, at, conv_state, 2 * keys + at.value_head * p.value_dim, p.value_dim, thread);
  if (group == 1 || shared.last) {
    shift(p, at, conv_state, at.key_head * p.key_dim, p.key_dim, thread);
    shift(p, at, conv_state, keys + at.key_head * p.key_dim, p.key_dim, thread - kDim);
  }
#endif
}

template <typename T, typename State, bool kWhole>
cudaError_t launch(const Nf4GatedDelta& p) {
  return launch_kernel(gated_delta<T, State, kWhole>, {dim3(p.value_heads, p.sequences), kWarps * 32}, p.stream, p);
}

template <typename T>
cudaError_t launch_with(const Nf4GatedDelta& p) {
  bool whole = p.key_dim == kDim && p.value_dim == kDim;
  if (p.state_dtype == NF4_FLOAT32) return whole ? launch<T, float, true>(p) : launch<T, float, false>(p);
  return whole ? launch<T, __nv_bfloat16, true>(p) : launch<T, __nv_bfloat16, false>(p);
}

}  // namespace
}  // namespace nf4

// Advances the states of all sequences by their tokens. Returns a cudaError_t, cudaErrorInvalidValue for what no kernel takes:
// heads of more than 128 or of no multiple of 4, other than 4 taps, more than 65535 sequences.
NF4_EXPORT int nf4_cuda_gated_delta(const Nf4GatedDelta* p) {
  auto takes = [](int dim) { return dim >= 4 && dim <= nf4::kDim && dim % 4 == 0; };
  if (!takes(p->key_dim) || !takes(p->value_dim) || p->taps != nf4::kTaps || p->key_heads < 1 ||
      p->value_heads % p->key_heads || p->sequences < 1 || p->sequences > 65535 || !p->slots || !p->counters) {
    return cudaErrorInvalidValue;
  }
  if (p->dtype == NF4_FLOAT32) return nf4::launch_with<float>(*p);
  return p->dtype == NF4_FLOAT16 ? nf4::launch_with<__half>(*p) : nf4::launch_with<__nv_bfloat16>(*p);
}
