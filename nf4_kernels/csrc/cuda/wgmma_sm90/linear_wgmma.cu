// The C entries of linear_wgmma.cuh: they validate what is asked, fill the kernel's arguments and launch.
#include "../tensor_maps.cuh"
#include "launch.cuh"

namespace nf4 {
namespace {

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
  args->place_first = w.group_offset << args->scale_shift;
  args->place_pitch = args->k_blocks + (w.group_skip << args->scale_shift);
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
  cuuint64_t row_bytes = static_cast<cuuint64_t>(w.k / 2), n = static_cast<cuuint64_t>(w.n);
  cuuint64_t sizes[2][3] = {{row_bytes, n}, {row_bytes, 2, n / 2}};
  cuuint64_t pitches[2][2] = {{row_bytes}, {n / 2 * row_bytes, row_bytes}};
  cuuint32_t count = static_cast<cuuint32_t>(rows);
  cuuint32_t boxes[2][3] = {{128, count}, {128, 2, count / 2}};
  return encode_swizzled(w.packed, gates ? 3 : 2, sizes[gates], pitches[gates], boxes[gates], map);
}

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
template <bool kTimed>
cudaError_t launch(const Nf4Linear& linear, const WgmmaPlan& plan, const WgmmaSizes& sizes, const WgmmaArgs& args) {
  CUtensorMap map;
  if (!encode_weight_map(linear.weight, plan.groups * 64, args.gate.columns > 0, &map)) return cudaErrorNotSupported;
#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SCALE_ON, PING_PONG)                               \
  if (plan.tokens == TOKENS && plan.groups == GROUPS) {                                                       \
    using Instance = WgmmaInstance<TOKENS, GROUPS, STAGES, TOKEN_STAGES, ScaleOn::SCALE_ON, PING_PONG>;       \
    return launch_instance<Instance, kTimed>(linear, sizes, args, map);                                       \
  }
  NF4_WGMMA_INSTANCES
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

template <bool kTimed>
int validate_and_launch(const Nf4Linear& linear, const WgmmaPlan& plan) {
  if (!validate(linear)) return cudaErrorInvalidValue;
  WgmmaSizes sizes(linear, plan);
  WgmmaArgs args{};
  if (!build_args(linear, plan, sizes, &args)) return cudaErrorInvalidValue;
  return launch<kTimed>(linear, plan, sizes, args);
}

}  // namespace
}  // namespace nf4

// Both launch and return a cudaError_t, which is cudaErrorInvalidValue where no instance fits. For devices of
// capability 9.0.
NF4_EXPORT int nf4_cuda_linear_wgmma(const Nf4Linear* linear, const WgmmaPlan* plan) {
  return nf4::validate_and_launch<false>(*linear, *plan);
}

// The same, with a warpgroup that times its decoding.
NF4_EXPORT int nf4_cuda_linear_wgmma_timed(const Nf4Linear* linear, const WgmmaPlan* plan) {
  return nf4::validate_and_launch<true>(*linear, *plan);
}
