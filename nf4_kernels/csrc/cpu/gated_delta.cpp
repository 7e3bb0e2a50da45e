/* The gated delta rule over all sequences of a step: a task is one key head of one sequence, with its value heads, so that no
 * two tasks touch the same states. */
#include <omp.h>

#include "cpu.h"
#include "gated_delta_tile.h"
#include "isa.h"
#include "parallel.h"

namespace nf4 {
namespace {

bool valid(const Nf4GatedDelta* p) {
  if (!p || !p->qkv || !p->z || !p->a || !p->b || !p->conv_weight || !p->a_log || !p->dt_bias || !p->norm_weight) return false;
  if ((p->taps > 1 && !p->conv_state) || !p->state || !p->out || !p->slots || (p->starts && !p->has_state)) return false;
  if (p->key_heads < 1 || p->value_heads < 1 || p->value_heads % p->key_heads) return false;
  return p->key_dim > 0 && p->value_dim > 0 && p->taps > 0 && p->dtype >= NF4_FLOAT32 && p->dtype <= NF4_BFLOAT16;
}

void write_zeros(const Nf4GatedDelta* p, int64_t row, int64_t tokens, int head) {
  const int64_t size = p->dtype == NF4_FLOAT32 ? 4 : 2, width = (int64_t)p->value_heads * p->value_dim * size;
  const int64_t part = width / p->key_heads;
  for (int64_t t = row; t < row + tokens; ++t) memset((char*)p->out + t * width + head * part, 0, part);
}

void run_task(const Nf4GatedDelta* p, DeltaKernel* kernel, int64_t task) {
  static thread_local Scratch wide, room;
  const int64_t sequence = task / p->key_heads;
  const int head = (int)(task % p->key_heads);
  const int64_t begin = p->starts ? p->starts[sequence] : sequence;
  const int64_t end = p->starts ? p->starts[sequence + 1] : sequence + 1;
  const int64_t slot = p->slots[sequence];
  if (slot < 0) return write_zeros(p, begin, end - begin, head);
  float* state = p->state_dtype == NF4_FLOAT32 ? nullptr : wide.floats((size_t)p->key_dim * p->value_dim);
  float* rest = room.floats((size_t)delta_room(p));
  for (int64_t row = begin; row < end; row += kDeltaTokens) {
    const int tokens = (int)(end - row < kDeltaTokens ? end - row : kDeltaTokens);
    const DeltaTile tile{{row, tokens, slot, row > begin || !p->has_state || p->has_state[sequence]}, p};
    kernel(&tile, head, state, rest);
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" int nf4_cpu_gated_delta(const Nf4GatedDelta* p, int32_t threads) {
  if (!valid(p)) return 1;
  DeltaKernel* kernel = active_kernels()->gated_delta;
  const int64_t tasks = (int64_t)p->sequences * p->key_heads;
  if (threads > tasks) threads = (int32_t)tasks;
  if (threads < 1) threads = 1;
  TaskQueue& queue = TaskQueue::begin(tasks, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int id = omp_get_thread_num();
    for (int64_t t; (t = queue.take(id)) >= 0;) run_task(p, kernel, t);
  }
  return 0;
}
