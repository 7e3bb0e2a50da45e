/* Mamba2 over all sequences of a step, in blocks of rows: first their convolutions, then their states, then their norms. */
#include <omp.h>

#include <vector>

#include "cpu.h"
#include "isa.h"
#include "mamba2_kernels.h"
#include "parallel.h"

namespace nf4 {
namespace {

bool valid(const Nf4Mamba2* p) {
  if (!p || !p->z || !p->xbc || !p->dt || !p->conv_weight || !p->a_log || !p->d || !p->dt_bias) return false;
  if ((p->taps > 1 && !p->conv_state) || !p->state || !p->out || !p->slots || (p->starts && !p->has_state)) return false;
  if (p->heads < 1 || p->head_dim < 1 || p->state_dim < 1 || p->taps < 1 || p->groups < 1 || p->norm_groups < 1) return false;
  if (p->heads % p->groups || p->heads * p->head_dim % p->norm_groups) return false;
  return p->dtype >= NF4_FLOAT32 && p->dtype <= NF4_BFLOAT16;
}

/* The rows of all sequences in pieces of up to kMambaRows; those of padding become zeros. */
void cut(const Nf4Mamba2* p, std::vector<SequenceRows>& pieces) {
  const int64_t width = (int64_t)p->heads * p->head_dim * (p->dtype == NF4_FLOAT32 ? 4 : 2);
  pieces.clear();
  for (int32_t i = 0; i < p->sequences; ++i) {
    const int64_t begin = p->starts ? p->starts[i] : i, end = p->starts ? p->starts[i + 1] : i + 1;
    if (p->slots[i] < 0) memset((char*)p->out + begin * width, 0, (end - begin) * width);
    for (int64_t row = begin; p->slots[i] >= 0 && row < end; row += kMambaRows) {
      const int tokens = (int)(end - row < kMambaRows ? end - row : kMambaRows);
      pieces.push_back({row, tokens, p->slots[i], row > begin || !p->has_state || p->has_state[i]});
    }
  }
}

/* How many of `count` pieces a block has whose rows lie within kMambaRows. */
int64_t block_of(const SequenceRows* pieces, int64_t count) {
  int64_t taken = 1;
  while (taken < count && pieces[taken].row + pieces[taken].tokens - pieces[0].row <= kMambaRows) ++taken;
  return taken;
}

/* One thread's part of a block. */
void run_block(const Mamba2Kernels& kernels, const MambaBlock& block, const SequenceRows* pieces, int64_t count) {
  static thread_local Scratch scratch;
  const Nf4Mamba2* p = block.p;
  float* room = scratch.floats((size_t)mamba2_room(p));
  const int64_t parts = (block.channels + kMambaChannels - 1) / kMambaChannels;
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < count * parts; ++task) {
    const int64_t first = task % parts * kMambaChannels, left = block.channels - first;
    kernels.convolve(&block, &pieces[task / parts], first, (int)(left < kMambaChannels ? left : kMambaChannels), room);
  }
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < count * p->heads; ++task) {
    kernels.advance(&block, &pieces[task / p->heads], (int)(task % p->heads), room);
  }
  const int64_t rows = pieces[count - 1].row + pieces[count - 1].tokens - block.first_row;
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < rows * p->norm_groups; ++task) {
    const int64_t row = block.first_row + task / p->norm_groups;
    for (int64_t i = 0; i < count; ++i) {
      if (row < pieces[i].row || row >= pieces[i].row + pieces[i].tokens) continue;
      kernels.normalise(&block, row, (int)(task % p->norm_groups), room);
    }
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" int nf4_cpu_mamba2(const Nf4Mamba2* p, int32_t threads) {
  if (!valid(p)) return 1;
  static thread_local std::vector<SequenceRows> pieces;
  static thread_local Scratch mixed, y;
  cut(p, pieces);
  const int64_t width = (int64_t)p->heads * p->head_dim, channels = width + (int64_t)2 * p->groups * p->state_dim;
  MambaBlock block{p, 0, channels, mixed.floats((size_t)(kMambaRows * channels)), y.floats((size_t)(kMambaRows * width))};
  const Mamba2Kernels& kernels = *active_kernels()->mamba2;
  const SequenceRows* all = pieces.data();
  const int64_t count = (int64_t)pieces.size();
  if (threads < 1) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1) firstprivate(block)
  for (int64_t i = 0; i < count;) {
    const int64_t taken = block_of(all + i, count - i);
    block.first_row = all[i].row;
    run_block(kernels, block, all + i, taken);
    i += taken;
  }
  return 0;
}
