// The C entry of work.cuh: it validates what is asked, fills the kernel's arguments and makes the launches.
#include "../../tensor_maps.cuh"
#include "../sums.cuh"
#include "instances.cuh"
#include "prepare.cuh"

namespace nf4 {
namespace {

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether the kernels take these operands at all.
bool validate(const Nf4Moe& moe) {
  const Nf4Weight& w = moe.weight;
  if (w.k % 64 || w.blocksize < 64 || moe.dtype == NF4_FLOAT32 || !aligned(w.packed, 16)) return false;
  if (moe.num_experts < 1 || moe.num_experts * w.n >= int64_t{1} << 31 || moe_choices(moe) >= 1 << 30) return false;
  // Nested scales are indexed with 32 bits.
  if (moe.num_experts * w.n * (w.k / 64) >= int64_t{1} << 32) return false;
  return !moe.activation || (w.n % 4 == 0 && !moe.routing);
}

MoeWgmmaArgs build_args(const Nf4Moe& moe, const MoeWgmmaPlan& plan) {
  const Nf4Weight& w = moe.weight;
  MoeWgmmaArgs args{};
  args.weight = w;
  args.bias = moe.bias;
  args.out = moe.out;
  args.n = static_cast<int>(w.n);
  args.k_blocks = static_cast<int>(w.k / 64);
  args.place_pitch = static_cast<unsigned>(args.k_blocks);
  args.scale_shift = log2_of(w.blocksize / 64);
  args.steps = static_cast<int>((w.k + 255) / 256);
  args.own_scales = w.blocksize == 64;
  args.wide_scales = args.k_blocks % (w.absmax_8bit ? 16 : 4) == 0 &&
                     aligned(w.absmax_8bit ? static_cast<const void*>(w.absmax_8bit) : w.absmax, 16);
  args.gate.columns = moe.activation ? args.n / 2 : 0;
  args.activation = moe.activation;
  args.row_tiles = (args.n + plan.groups * 64 - 1) / (plan.groups * 64);
  return args;
}

// The weights as [num_experts][n][k / 2] bytes, or where the epilogue gates, as [num_experts][n / 2][gate, up][k / 2]. They are
// copied in boxes of rows x 128 bytes that land swizzled. False where the driver cannot make the map.
bool encode_map(const Nf4Moe& moe, int rows, CUtensorMap* map) {
  const Nf4Weight& w = moe.weight;
  bool gates = moe.activation != NF4_NO_ACTIVATION;
  cuuint64_t row = static_cast<cuuint64_t>(w.k / 2), n = static_cast<cuuint64_t>(w.n);
  cuuint64_t experts = static_cast<cuuint64_t>(moe.num_experts);
  cuuint64_t sizes[2][4] = {{row, n, experts}, {row, 2, n / 2, experts}};
  cuuint64_t pitches[2][3] = {{row, n * row}, {n / 2 * row, row, n * row}};
  cuuint32_t count = static_cast<cuuint32_t>(rows);
  cuuint32_t boxes[2][4] = {{128, count, 1}, {128, 2, count / 2, 1}};
  return encode_swizzled(w.packed, gates ? 4 : 3, sizes[gates], pitches[gates], boxes[gates], map);
}

// Launches the instance that the plan names; cudaErrorInvalidValue where there is none.
cudaError_t launch(const Nf4Moe& moe, const MoeWgmmaPlan& plan, const MoeWgmmaArgs& args) {
  CUtensorMap map;
  if (!encode_map(moe, plan.groups * 64, &map)) return cudaErrorNotSupported;
#define NF4_INSTANCE(TOKENS, GROUPS, STAGES, TOKEN_STAGES, SCALE_ON, PING_PONG)                              \
  if (plan.tokens == TOKENS && plan.groups == GROUPS) {                                                      \
    using Instance = WgmmaInstance<TOKENS, GROUPS, STAGES, TOKEN_STAGES, ScaleOn::SCALE_ON, PING_PONG>;      \
    return launch_moe_instance<Instance>(moe, args, map, plan.grid);                                         \
  }
  NF4_MOE_INSTANCES
#undef NF4_INSTANCE
  return cudaErrorInvalidValue;
}

// The launches in front of the GEMM; the list begins at the workspace's beginning, and behind it lies what is made of x.
template <typename T>
cudaError_t launch_preparation(const Nf4Moe& moe, const MoeWgmmaPlan& plan, MoeWgmmaArgs* args) {
  PrepareArgs prepare{};
  prepare.sort = sort_args(moe, plan.tokens, &args->list);
  prepare.x = moe.x;
  prepare.ordered = reinterpret_cast<uint4*>(static_cast<char*>(moe.workspace) +
                                             list_bytes(args->list.capacity, args->list.size));
  prepare.zeroed = moe.routing ? nullptr : moe.out;
  prepare.columns = moe.activation ? args->n / 2 : args->n;
  prepare.rows = static_cast<int>(moe.x_of_choices ? moe_choices(moe) : moe.tokens);
  prepare.k_blocks = args->k_blocks;
  prepare.padded_blocks = args->steps * 4;
  args->tiles = reinterpret_cast<const char*>(prepare.ordered);
  args->x_choices = moe.x_of_choices ? 1 : moe.top_k;
  args->row_bytes = static_cast<unsigned>(args->steps) * 512;
  args->tiled = plan.tiled != 0;
  if (args->tiled) {
    cudaError_t status = launch_sort(moe, prepare.sort);
    if (status != cudaSuccess) return status;
    return launch_kernel(tile_choices<T>, {plan.grid * 2, kSortThreads}, moe.stream, prepare, args->list,
                         args->x_choices);
  }
  int64_t chunks = int64_t{prepare.rows} * args->row_bytes / 16, blocks = (chunks + kSortThreads - 1) / kSortThreads;
  if (blocks > plan.grid * 2) blocks = plan.grid * 2;
  return launch_kernel(prepare_choices<T>, {blocks + 1, kSortThreads, sort_shared_bytes(moe.num_experts)},
                       moe.stream, prepare);
}

template <typename T>
cudaError_t launch_all(const Nf4Moe& moe, const MoeWgmmaPlan& plan) {
  MoeWgmmaArgs args = build_args(moe, plan);
  cudaError_t status = launch_preparation<T>(moe, plan, &args);
  if (status != cudaSuccess) return status;
  int64_t rows = plan.tiled ? int64_t{args.list.capacity} * plan.tokens : moe.x_of_choices ? moe_choices(moe) : moe.tokens;
  char* results = const_cast<char*>(args.tiles) + rows * args.row_bytes;
  if (moe.routing) args.out = results;
  status = launch(moe, plan, args);
  if (status != cudaSuccess || !moe.routing) return status;
  SumArgs sums{results, moe.experts, moe.routing, moe.out, static_cast<int>(moe.tokens), moe.top_k,
               moe.num_experts, 1, args.n, args.n % 4 == 0};
  return launch_sums<T, T>(sums, moe.stream);
}

}  // namespace
}  // namespace nf4

// Launches; returns a cudaError_t, cudaErrorInvalidValue where no instance fits. For devices of capability 9.0.
NF4_EXPORT int nf4_cuda_moe_wgmma(const Nf4Moe* moe, const MoeWgmmaPlan* plan) {
  if (!nf4::validate(*moe)) return cudaErrorInvalidValue;
  return moe->dtype == NF4_FLOAT16 ? nf4::launch_all<__half>(*moe, *plan)
                                   : nf4::launch_all<__nv_bfloat16>(*moe, *plan);
}
