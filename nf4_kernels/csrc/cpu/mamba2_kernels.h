/* What a kernel file offers for Mamba2: the parts of a layer's step, between which all threads wait. */
#pragma once

#include "kernels.h"
#include "mamba2.h"
#include "sequence_rows.h"

namespace nf4 {

/* Channels that are convolved in one task. */
constexpr int kMambaChannels = 128;
/* Rows of a layer's step that are computed together: their results of the convolution lie in memory. */
constexpr int kMambaRows = 64;

/* mixed: [kMambaRows][channels], y: [kMambaRows][heads * head_dim], both of a block's rows from first_row on. */
struct MambaBlock {
  const Nf4Mamba2* p;
  int64_t first_row;
  int64_t channels;
  float* mixed;
  float* y;
};

struct Mamba2Kernels {
  /* Channels [first, first + count) of a sequence's rows. room: mamba2_room() floats. */
  void (*convolve)(const MambaBlock* block, const SequenceRows* rows, int64_t first, int count, float* room);
  /* One head's state over a sequence's rows; room: head_dim floats. */
  void (*advance)(const MambaBlock* block, const SequenceRows* rows, int head, float* room);
  /* One part of a row's gated norm; room: as many floats as the part has columns. */
  void (*normalise)(const MambaBlock* block, int64_t row, int group, float* room);
};

extern const Mamba2Kernels mamba2_portable, mamba2_avx2, mamba2_avx512;

static inline int64_t mamba2_room(const Nf4Mamba2* p) {
  const int64_t convolved = (2 * (int64_t)p->taps + kMambaRows) * kMambaChannels;
  const int64_t width = (int64_t)p->heads * p->head_dim / p->norm_groups;
  return convolved > width ? convolved : width;
}

}  // namespace nf4
