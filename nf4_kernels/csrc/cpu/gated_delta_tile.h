/* What a kernel of the gated delta rule computes at a time. */
#pragma once

#include "gated_delta.h"
#include "kernels.h"
#include "sequence_rows.h"

namespace nf4 {

/* Tokens of a tile at most: their q, k and v stay in L2 with a head's state. */
constexpr int kDeltaTokens = 32;

/* Some tokens of one sequence. */
struct DeltaTile : SequenceRows {
  const Nf4GatedDelta* p;
};

/* One key head of a tile, with its value heads. wide: room for a state, where those of the slots are in 16 bit. room: for
 * delta_room() floats. */
typedef void DeltaKernel(const DeltaTile* tile, int head, float* wide, float* room);
DeltaKernel gated_delta_portable, gated_delta_avx2, gated_delta_avx512;

static inline int64_t delta_room(const Nf4GatedDelta* p) {
  const int64_t dim = p->key_dim > p->value_dim ? p->key_dim : p->value_dim;
  /* q, k and v; two rows; a convolution's inputs and weights. */
  return (3 * kDeltaTokens + 2 + 2 * (int64_t)p->taps + kDeltaTokens) * dim;
}

}  // namespace nf4
