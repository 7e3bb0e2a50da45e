// The C entry of linear_wgmma.cuh: its workspace, the weight's tensor map and the two launches.
#include "linear_wgmma.cuh"

// linear_wgmma_timed_sm90.cu makes the same of the kernels that take the times of their decoding.
#ifndef NF4_TIMED
#define NF4_TIMED false
#define NF4_LINEAR_WGMMA nf4_cuda_linear_wgmma
#endif

namespace nf4 {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct WgmmaSizes {
  int64_t row_tiles, token_tiles, steps, lines, line_units, runs, tile_bytes;
  WgmmaSizes(int64_t m, int64_t n, int64_t k, const WgmmaPlan& plan) {
    row_tiles = ceil_div(n, plan.groups * 64);
    token_tiles = ceil_div(m, plan.tokens);
    steps = ceil_div(k, 256);
    lines = plan.owner_steps ? row_tiles * token_tiles : 1;
    line_units = row_tiles * token_tiles * steps / lines;
    runs = plan.grid / lines < line_units ? plan.grid / lines : line_units;
    tile_bytes = token_tiles * plan.tokens * steps * 512;
  }
};

// The weight as [n][k / 2] bytes, taken in boxes of rows x 128 bytes that land swizzled; where a launch gates, as
// [n / 2][gate, up][k / 2], in boxes of as many rows. False where the driver cannot.
bool weight_map(const Nf4Weight& w, int rows, bool gates, CUtensorMap* map) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // The runtime hands the driver's function out: nothing is linked against the driver.
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (!encode) return false;
  cuuint64_t row_bytes = static_cast<cuuint64_t>(w.k / 2), n = static_cast<cuuint64_t>(w.n);
  cuuint64_t sizes[2][3] = {{row_bytes, n}, {row_bytes, 2, n / 2}}, pitches[2][2] = {{row_bytes}, {n / 2 * row_bytes, row_bytes}};
  cuuint32_t count = static_cast<cuuint32_t>(rows), boxes[2][3] = {{128, count}, {128, 2, count / 2}}, strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, gates ? 3 : 2, const_cast<uint8_t*>(w.packed), sizes[gates],
                pitches[gates], boxes[gates], strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T>
cudaError_t arrange(const Nf4Linear& linear, const WgmmaSizes& sizes, int tokens, cudaStream_t stream) {
  int64_t chunks = sizes.tile_bytes / 16;
  // Where the weight may be read at once, this launch and the next one, which reads it, overlap with the kernel before.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(chunks, 256)));
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = linear.constant_weights ? 1 : 0;
  if (linear.norm_weight) {
    config.gridDim = dim3(static_cast<unsigned>(sizes.token_tiles * tokens));
    config.blockDim = dim3(kNormThreads);
    return cudaLaunchKernelEx(&config, arrange_normalised<T>, static_cast<const T*>(linear.x),
                              static_cast<const T*>(linear.norm_weight), linear.norm_eps,
                              static_cast<uint4*>(linear.workspace), static_cast<int>(linear.m),
                              static_cast<int>(linear.weight.k / 64), static_cast<int>(sizes.steps * 4), tokens,
                              linear.clock);
  }
  return cudaLaunchKernelEx(&config, arrange_tokens<T>, static_cast<const T*>(linear.x),
                            static_cast<uint4*>(linear.workspace), static_cast<int>(linear.m),
                            static_cast<int>(linear.weight.k / 64), static_cast<int>(sizes.steps * 4), tokens,
                            static_cast<int>(chunks), linear.clock);
}

template <typename T, int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns, bool kNested,
          bool kGates>
cudaError_t launch(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args, const CUtensorMap& map) {
  cudaStream_t stream = static_cast<cudaStream_t>(linear.stream);
  auto* kernel = linear_wgmma<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns, kNested, kGates, NF4_TIMED>;
  constexpr int kShared = WgmmaLayout<kTokens, kGroups, kStages, kTokenStages>::kTotal;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  if (!linear.tiles) status = arrange<T>(linear, sizes, kTokens, stream);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(sizes.runs), static_cast<unsigned>(sizes.lines));
  config.blockDim = dim3((kGroups + 1) * 128);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &overlap;
  // Behind arrange() it may always overlap: where weights are not constant that began behind the one that wrote them.
  config.numAttrs = !linear.tiles || linear.constant_weights ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args, map);
}

template <int kTokens, int kGroups, int kStages, int kTokenStages, int kSums, bool kTurns>
cudaError_t launch(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args, const CUtensorMap& map) {
  bool nested = linear.weight.absmax_8bit != nullptr;
#define NF4_LAUNCH(T, GATES)                                                                                              \
  return nested                                                                                                           \
             ? launch<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns, true, GATES>(linear, sizes, args, map)   \
             : launch<T, kTokens, kGroups, kStages, kTokenStages, kSums, kTurns, false, GATES>(linear, sizes, args, map)
  if (args.gate.columns) NF4_LAUNCH(__nv_bfloat16, true);
#ifndef NF4_BF16_ONLY
  if (linear.dtype == NF4_FLOAT16) NF4_LAUNCH(__half, false);
#endif
  NF4_LAUNCH(__nv_bfloat16, false);
#undef NF4_LAUNCH
}

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits. For devices of capability 9.0.
NF4_EXPORT int NF4_LINEAR_WGMMA(const Nf4Linear* linear, const WgmmaPlan* plan) {
  const Nf4Weight& w = linear->weight;
  if (w.k % 64 || w.blocksize < 64 || linear->dtype == NF4_FLOAT32 || !nf4::aligned(w.packed, 16)) {
    return cudaErrorInvalidValue;
  }
  if (linear->norm_weight && (linear->dtype != NF4_BFLOAT16 || w.k > NF4_NORM_K)) return cudaErrorInvalidValue;
  if (linear->tiles && (linear->norm_weight || !nf4::aligned(linear->tiles, 16))) return cudaErrorInvalidValue;
  if (!nf4::gate_fits(*linear)) return cudaErrorInvalidValue;
  nf4::WgmmaSizes sizes(linear->m, w.n, w.k, *plan);
  nf4::WgmmaArgs args{};
  args.weight = w;
  args.bias = linear->bias;
  args.residual = linear->residual;
  args.gate = nf4::gate_of(*linear);
  args.clock = linear->clock;
  args.out = linear->out;
  args.tiles = static_cast<const char*>(linear->tiles ? linear->tiles : linear->workspace);
  args.begins = linear->tiles != nullptr;
  args.partial = reinterpret_cast<float4*>(static_cast<char*>(linear->workspace) + sizes.tile_bytes);
  args.counters = linear->counters;
  args.m = static_cast<int>(linear->m);
  args.n = static_cast<int>(w.n);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.scale_shift = nf4::log2_of(w.blocksize / 64);
  args.steps = static_cast<int>(sizes.steps);
  args.token_tiles = static_cast<int>(sizes.token_tiles);
  int units = static_cast<int>(sizes.line_units), runs = static_cast<int>(sizes.runs);
  if (plan->owner_steps == 0) {
    args.run_units = units / runs;
    args.longer_runs = units % runs;
  } else {
    int rest = units - plan->owner_steps;
    if (plan->grid % sizes.lines || runs < 2 || rest < runs - 1) return cudaErrorInvalidValue;
    args.run_units = rest / (runs - 1);
    args.longer_runs = rest % (runs - 1) + 1;
    args.owner_units = plan->owner_steps - args.run_units - 1;
  }
  args.whole_scales = args.k_blocks % 4 == 0 && w.blocksize == 64 &&
                      (w.absmax_8bit ? nf4::aligned(w.absmax_8bit, 4) : nf4::aligned(w.absmax, 16));
  args.wide_scales = args.whole_scales && args.k_blocks % 16 == 0 && nf4::aligned(w.absmax_8bit, 16);
  CUtensorMap map;
  if (!nf4::weight_map(w, plan->groups * 64, args.gate.columns > 0, &map)) return cudaErrorNotSupported;
#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SUMS, TURNS)                                 \
  if (plan->tokens == TOKENS && plan->groups == GROUPS) {                                          \
    return nf4::launch<TOKENS, GROUPS, STAGES, TOKEN_STAGES, SUMS, TURNS>(*linear, sizes, args, map);     \
  }
#ifdef NF4_WGMMA_INSTANCES
  NF4_WGMMA_INSTANCES
#else
  NF4_INSTANCE(16, 2, 5, 5, 2, false)
  NF4_INSTANCE(16, 3, 4, 5, 2, false)
  NF4_INSTANCE(32, 2, 5, 4, 2, false)
  NF4_INSTANCE(32, 3, 4, 3, 2, false)
  NF4_INSTANCE(64, 2, 4, 5, 2, false)
  NF4_INSTANCE(64, 3, 4, 3, 1, false)
  NF4_INSTANCE(128, 2, 4, 5, 1, true)
  NF4_INSTANCE(256, 2, 3, 3, 0, false)
#endif
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}
