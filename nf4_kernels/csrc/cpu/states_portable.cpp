/* The gated delta rule and Mamba2 on any CPU. */
namespace nf4 {
namespace {

typedef float Lanes __attribute__((vector_size(16)));

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }

}  // namespace
}  // namespace nf4

#include "gated_delta_rule.h"
#include "mamba2_scan.h"

namespace nf4 {

void gated_delta_portable(const DeltaTile* tile, int head, float* wide, float* room) { key_head(*tile, head, wide, room); }

const Mamba2Kernels mamba2_portable{mamba2_convolve, mamba2_advance, mamba2_normalise};

}  // namespace nf4
