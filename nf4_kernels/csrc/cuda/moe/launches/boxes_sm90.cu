// The instances of rows.cuh whose weights are copied in boxes.
#include "../../tensor_maps.cuh"
#include "launch_instance.cuh"

namespace nf4 {
namespace {

// The weights as [num_experts][pieces of 128 bytes][n][128 bytes], or with an activation as [num_experts][pieces][gate, up]
// [n / 2][128 bytes]; a box is the 16 rows of a unit. False where the driver cannot make the map.
bool encode_boxes(const Nf4Moe& moe, CUtensorMap* map) {
  const Nf4Weight& w = moe.weight;
  bool gates = moe.activation != NF4_NO_ACTIVATION;
  cuuint64_t row = static_cast<cuuint64_t>(w.k / 2), n = static_cast<cuuint64_t>(w.n), pieces = row / 128;
  cuuint64_t experts = static_cast<cuuint64_t>(moe.num_experts);
  cuuint64_t sizes[2][5] = {{128, n, pieces, experts}, {128, n / 2, 2, pieces, experts}};
  cuuint64_t pitches[2][4] = {{row, 128, n * row}, {row, n / 2 * row, 128, n * row}};
  cuuint32_t count = static_cast<cuuint32_t>(pieces);
  cuuint32_t boxes[2][5] = {{128, kGroupRows, count, 1}, {128, kHalfRows, 2, count, 1}};
  return encode_swizzled(w.packed, gates ? 5 : 4, sizes[gates], pitches[gates], boxes[gates], map);
}

template <typename T, int kWarps, int kTeams, int kBlocks, int kTiles, bool kNested>
cudaError_t launch_boxed(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  using Layout = MoeLayout<kWarps, kTeams, kBlocks, kTiles, kNested, true>;
  CUtensorMap map;
  if (!fits<Layout>(args, plan) || args.k_blocks != Layout::kUnitBlocks || !encode_boxes(moe, &map)) return cudaErrorInvalidValue;
  return launch_kernel(moe_rows_boxed<T, kWarps, kTeams, kBlocks, kTiles, kNested>,
                       {plan.grid, Layout::kThreads, shared_bytes<Layout, kTiles>(plan)}, moe.stream, args, map);
}

template <int kWarps, int kTeams, int kBlocks, int kTiles>
cudaError_t launch_boxed(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  bool nested = moe.weight.absmax_8bit != nullptr;
#ifndef NF4_BF16_ONLY
  if (moe.dtype == NF4_FLOAT16) {
    return nested ? launch_boxed<__half, kWarps, kTeams, kBlocks, kTiles, true>(args, moe, plan)
                  : launch_boxed<__half, kWarps, kTeams, kBlocks, kTiles, false>(args, moe, plan);
  }
#endif
  return nested ? launch_boxed<__nv_bfloat16, kWarps, kTeams, kBlocks, kTiles, true>(args, moe, plan)
                : launch_boxed<__nv_bfloat16, kWarps, kTeams, kBlocks, kTiles, false>(args, moe, plan);
}

}  // namespace
}  // namespace nf4

#undef NF4_INSTANCE
#define NF4_INSTANCE(WARPS, TEAMS, BLOCKS, TILES)                                                                    \
  if (plan.warps == WARPS && plan.teams == TEAMS && plan.blocks == BLOCKS && plan.tiles == TILES) {                  \
    return launch_boxed<WARPS, TEAMS, BLOCKS, TILES>(args, moe, plan);                                               \
  }

cudaError_t nf4::launch_boxed_moe_rows(const MoeRowsArgs& args, const Nf4Moe& moe, const MoeRowsPlan& plan) {
  NF4_MOE_BOXED_ROWS
  return cudaErrorInvalidValue;
}
