// The C entry of linear_wgmma.cuh: it validates what is asked, fills the kernel's arguments and launches.
#include "linear_wgmma.cuh"

// linear_wgmma_timed.cu compiles this again, for the kernels that take the times of their decoding.
#ifndef NF4_TIMED
#define NF4_TIMED false
#define NF4_LINEAR_WGMMA nf4_cuda_linear_wgmma
#endif

// The instances: tokens of a tile, consumer warpgroups, stages of weights, stages of tokens, what is scaled, ping-pong; each
// with its reason. nf4_kernels/plan/wgmma.py lists the same tokens and warpgroups, docs/adr/0007 the measurements.
#ifndef NF4_WGMMA_INSTANCES
#define NF4_WGMMA_INSTANCES                                                                                     \
  /* first stages are smaller than with three warpgroups: small weights start 1.7 us earlier */                 \
  NF4_INSTANCE(16, 2, 5, 5, kDoubleBufferedSums, false)                                                         \
  /* large weights have rows for all SMs anyway, and each token tile is loaded for more of them */              \
  NF4_INSTANCE(16, 3, 4, 5, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 2; token stages are twice as large, so one fewer fits */                                           \
  NF4_INSTANCE(32, 2, 5, 4, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 3; three token stages are what fits */                                                             \
  NF4_INSTANCE(32, 3, 4, 3, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 2; five stages of weights and four of tokens were no faster */                                     \
  NF4_INSTANCE(64, 2, 4, 5, kDoubleBufferedSums, false)                                                         \
  /* as 16 x 3; 144 registers a thread hold one buffer of sums, not two */                                      \
  NF4_INSTANCE(64, 3, 4, 3, kSums, false)                                                                       \
  /* as 128 x 2; smaller token stages, so two more fit */                                                       \
  NF4_INSTANCE(96, 2, 4, 7, kSums, true)                                                                        \
  /* there are registers for one buffer; ping-pong decodes meanwhile, 2 to 3 % faster */                        \
  NF4_INSTANCE(128, 2, 4, 5, kSums, true)                                                                       \
  /* there are no registers for a buffer beside the tile's sums; as many token stages as fit */                 \
  NF4_INSTANCE(160, 2, 3, 5, kWeights, false)                                                                   \
  NF4_INSTANCE(192, 2, 3, 4, kWeights, false)                                                                   \
  NF4_INSTANCE(224, 2, 4, 3, kWeights, false)                                                                   \
  NF4_INSTANCE(256, 2, 3, 3, kWeights, false)
#endif

namespace nf4 {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// How a GEMM's work is divided: Wgmma.workspace_bytes() of nf4_kernels/plan/wgmma.py counts the same.
struct WgmmaSizes {
  int64_t row_tiles, token_tiles;
  int64_t steps;       // k steps of a tile
  int64_t lines;       // that TileScheduler divides over thread blocks
  int64_t line_steps;  // k steps of a line
  int64_t blocks;      // thread blocks of a line
  int64_t tile_bytes;  // of all tiled activations
  WgmmaSizes(const Nf4Linear& linear, const WgmmaPlan& plan) {
    row_tiles = ceil_div(linear.weight.n, plan.groups * 64);
    token_tiles = ceil_div(linear.m, plan.tokens);
    steps = ceil_div(linear.weight.k, 256);
    lines = plan.first_split_steps ? row_tiles * token_tiles : 1;
    line_steps = row_tiles * token_tiles * steps / lines;
    blocks = plan.grid / lines < line_steps ? plan.grid / lines : line_steps;
    tile_bytes = token_tiles * plan.tokens * steps * 512;
  }
};

// Whether the kernels take these operands at all.
bool validate(const Nf4Linear& linear) {
  const Nf4Weight& w = linear.weight;
  if (w.k % 64 || w.blocksize < 64 || linear.dtype == NF4_FLOAT32 || !aligned(w.packed, 16)) return false;
  if (linear.norm_weight && (linear.dtype != NF4_BFLOAT16 || w.k > NF4_NORM_K)) return false;
  if (linear.tiles && (linear.norm_weight || !aligned(linear.tiles, 16))) return false;
  return gate_fits(linear);
}

// Divides each line's k steps over its thread blocks; false where the plan leaves some without any.
bool divide_steps(const WgmmaPlan& plan, const WgmmaSizes& sizes, WgmmaArgs* args) {
  int steps = static_cast<int>(sizes.line_steps), blocks = static_cast<int>(sizes.blocks);
  if (plan.first_split_steps == 0) {
    args->block_steps = steps / blocks;
    args->longer_blocks = steps % blocks;
    return true;
  }
  int rest = steps - plan.first_split_steps;
  if (plan.grid % sizes.lines || blocks < 2 || rest < blocks - 1) return false;
  args->block_steps = rest / (blocks - 1);
  args->longer_blocks = rest % (blocks - 1) + 1;
  args->first_extra = plan.first_split_steps - args->block_steps - 1;
  return true;
}

// Fills the kernel's arguments; false where the plan does not fit the work.
bool build_args(const Nf4Linear& linear, const WgmmaPlan& plan, const WgmmaSizes& sizes, WgmmaArgs* args) {
  const Nf4Weight& w = linear.weight;
  args->weight = w;
  args->bias = linear.bias;
  args->residual = linear.residual;
  args->gate = gate_of(linear);
  args->clock = linear.clock;
  args->out = linear.out;
  args->tiles = static_cast<const char*>(linear.tiles ? linear.tiles : linear.workspace);
  args->begins = linear.tiles != nullptr;
  args->partial = reinterpret_cast<float4*>(static_cast<char*>(linear.workspace) + sizes.tile_bytes);
  args->counters = linear.counters;
  args->m = static_cast<int>(linear.m);
  args->n = static_cast<int>(w.n);
  args->k_blocks = static_cast<int>(w.k / 64);
  args->scale_shift = log2_of(w.blocksize / 64);
  args->steps = static_cast<int>(sizes.steps);
  args->token_tiles = static_cast<int>(sizes.token_tiles);
  args->own_scales = w.blocksize == 64;
  args->wide_scales = args->k_blocks % (w.absmax_8bit ? 16 : 4) == 0 &&
                      aligned(w.absmax_8bit ? static_cast<const void*>(w.absmax_8bit) : w.absmax, 16);
  return divide_steps(plan, sizes, args);
}

// The weight as [n][k / 2] bytes, which are copied in boxes of rows x 128 bytes that land swizzled; where the epilogue
// gates, as [n / 2][gate, up][k / 2], in boxes of as many rows. False where the driver cannot make the map.
bool encode_weight_map(const Nf4Weight& w, int rows, bool gates, CUtensorMap* map) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // The runtime hands out the driver's function, so that nothing is linked against the driver.
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (!encode) return false;
  cuuint64_t row_bytes = static_cast<cuuint64_t>(w.k / 2), n = static_cast<cuuint64_t>(w.n);
  cuuint64_t sizes[2][3] = {{row_bytes, n}, {row_bytes, 2, n / 2}};
  cuuint64_t pitches[2][2] = {{row_bytes}, {n / 2 * row_bytes, row_bytes}};
  cuuint32_t count = static_cast<cuuint32_t>(rows);
  cuuint32_t boxes[2][3] = {{128, count}, {128, 2, count / 2}}, strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, gates ? 3 : 2, const_cast<uint8_t*>(w.packed), sizes[gates],
                pitches[gates], boxes[gates], strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A launch whose kernel may start before the one in front has ended where `dependent` (programmatic dependent launch).
class LaunchConfig {
 public:
  LaunchConfig(dim3 grid, int threads, int shared_bytes, void* stream, bool dependent) {
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = grid;
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = &attribute_;
    config_.numAttrs = dependent ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attribute_{};
  cudaLaunchConfig_t config_{};
};

// Launches what tiles the activations. Where the weight may be read at once, it and linear_wgmma, which reads the weight,
// may both start before the kernel in front has ended.
template <typename T>
cudaError_t launch_tiling(const Nf4Linear& linear, const WgmmaSizes& sizes, int tokens) {
  const T* x = static_cast<const T*>(linear.x);
  uint4* tiles = static_cast<uint4*>(linear.workspace);
  int m = static_cast<int>(linear.m), k_blocks = static_cast<int>(linear.weight.k / 64);
  int padded_blocks = static_cast<int>(sizes.steps * 4);
  if (linear.norm_weight) {
    dim3 grid(static_cast<unsigned>(sizes.token_tiles * tokens));
    LaunchConfig config(grid, kNormThreads, 0, linear.stream, linear.constant_weights);
    return cudaLaunchKernelEx(config.get(), normalise_and_tile_activations<T>, x,
                              static_cast<const T*>(linear.norm_weight), linear.norm_eps, tiles, m, k_blocks,
                              padded_blocks, tokens, linear.clock);
  }
  int64_t chunks = sizes.tile_bytes / 16;
  LaunchConfig config(dim3(static_cast<unsigned>(ceil_div(chunks, 256))), 256, 0, linear.stream,
                      linear.constant_weights);
  return cudaLaunchKernelEx(config.get(), tile_activations<T>, x, tiles, m, k_blocks, padded_blocks, tokens,
                            static_cast<int>(chunks), linear.clock);
}

template <typename Traits>
cudaError_t launch_kernels(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                           const CUtensorMap& map) {
  auto* kernel = linear_wgmma<Traits, NF4_TIMED>;
  constexpr int kShared = WgmmaLayout<Traits>::kTotal;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  if (!linear.tiles) status = launch_tiling<typename Traits::T>(linear, sizes, Traits::kTokens);
  if (status != cudaSuccess) return status;
  // Behind the launch that tiles the activations it may always start early: where weights are not constant, that one began
  // behind the kernel that wrote them.
  LaunchConfig config(dim3(static_cast<unsigned>(sizes.blocks), static_cast<unsigned>(sizes.lines)), Traits::kThreads,
                      kShared, linear.stream, !linear.tiles || linear.constant_weights);
  return cudaLaunchKernelEx(config.get(), kernel, args, map);
}

template <typename Instance>
cudaError_t launch_instance(const Nf4Linear& linear, const WgmmaSizes& sizes, const WgmmaArgs& args,
                            const CUtensorMap& map) {
  bool nested = linear.weight.absmax_8bit != nullptr;
#define NF4_LAUNCH(T, GATES)                                                                          \
  return nested ? launch_kernels<WgmmaTraits<T, Instance, true, GATES>>(linear, sizes, args, map)     \
                : launch_kernels<WgmmaTraits<T, Instance, false, GATES>>(linear, sizes, args, map)
  if (args.gate.columns) NF4_LAUNCH(__nv_bfloat16, true);
#ifndef NF4_BF16_ONLY
  if (linear.dtype == NF4_FLOAT16) NF4_LAUNCH(__half, false);
#endif
  NF4_LAUNCH(__nv_bfloat16, false);
#undef NF4_LAUNCH
}

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
cudaError_t launch(const Nf4Linear& linear, const WgmmaPlan& plan, const WgmmaSizes& sizes, const WgmmaArgs& args) {
  CUtensorMap map;
  if (!encode_weight_map(linear.weight, plan.groups * 64, args.gate.columns > 0, &map)) return cudaErrorNotSupported;
#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SCALE_ON, PING_PONG)                               \
  if (plan.tokens == TOKENS && plan.groups == GROUPS) {                                                       \
    using Instance = WgmmaInstance<TOKENS, GROUPS, STAGES, TOKEN_STAGES, ScaleOn::SCALE_ON, PING_PONG>;       \
    return launch_instance<Instance>(linear, sizes, args, map);                                               \
  }
  NF4_WGMMA_INSTANCES
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits. For devices of capability 9.0.
NF4_EXPORT int NF4_LINEAR_WGMMA(const Nf4Linear* linear, const WgmmaPlan* plan) {
  if (!nf4::validate(*linear)) return cudaErrorInvalidValue;
  nf4::WgmmaSizes sizes(*linear, *plan);
  nf4::WgmmaArgs args{};
  if (!nf4::build_args(*linear, *plan, sizes, &args)) return cudaErrorInvalidValue;
  return nf4::launch(*linear, *plan, sizes, args);
}
