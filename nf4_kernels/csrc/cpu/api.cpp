/* The exported functions that are not GEMMs: dequantizing, the choice of instruction set, the clocks. */
#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "isa.h"
#include "linear.h"
#include "parallel.h"
#include "struct_sizes.h"

namespace nf4 {

std::atomic<int64_t> dequant_ns{0}, linear_ns{0};

bool valid_weight(const Nf4Weight* w) {
  if (!w || !w->packed || !w->absmax || w->n < 1 || w->k < 1) return false;
  if (w->table < NF4_TABLE_NF4 || w->table > NF4_TABLE_FP4 || w->blocksize < 2 || w->blocksize % 2) return false;
  return !w->absmax_8bit || (w->absmax_code && w->absmax_offset);
}

}  // namespace nf4

using namespace nf4;

extern "C" {

int nf4_cpu_dequantize(const Nf4Weight* w, void* out, int32_t dtype, int32_t threads) {
  return valid_weight(w) ? nf4_cpu_dequantize_rows(w, 0, w->n, out, dtype, threads) : 1;
}

int nf4_cpu_dequantize_rows(const Nf4Weight* w, int64_t row, int64_t rows, void* out, int32_t dtype, int32_t threads) {
  if (!valid_weight(w) || !out || dtype < NF4_FLOAT32 || dtype > NF4_BFLOAT16) return 1;
  if (row < 0 || rows < 0 || row + rows > w->n) return 1;
  Stopwatch watch(dequant_ns);
  const Kernels* kernels = active_kernels();
  const int64_t start = row * w->k, total = rows * w->k, chunk = 16384;
  const int64_t chunks = (total + chunk - 1) / chunk;
  const int64_t width = dtype == NF4_FLOAT32 ? 4 : 2;
  if (threads > chunks) threads = (int32_t)chunks;
  if (threads < 1) threads = 1;
  TaskQueue& queue = TaskQueue::begin(chunks, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int id = omp_get_thread_num();
    for (int64_t t; (t = queue.take(id)) >= 0;) {
      const int64_t begin = t * chunk, end = begin + chunk < total ? begin + chunk : total;
      kernels->decode(w, start + begin, start + end, (char*)out + begin * width, dtype);
    }
  }
  return 0;
}

void nf4_cpu_count_linear(double seconds) { linear_ns.fetch_add((int64_t)(seconds * 1e9), std::memory_order_relaxed); }

const char* nf4_cpu_isa(void) { return active_kernels()->name; }

int nf4_cpu_set_isa(const char* name) { return name && select_kernels(name) ? 0 : 1; }

void nf4_cpu_clock(double* dequant_seconds, double* linear_seconds) {
  if (dequant_seconds) *dequant_seconds = (double)dequant_ns.load() * 1e-9;
  if (linear_seconds) *linear_seconds = (double)linear_ns.load() * 1e-9;
}

int64_t nf4_cpu_struct_size(const char* name) {
  /* struct_sizes.h has those that the CUDA library knows, too. */
  return name && strcmp(name, "Nf4Mamba2") == 0 ? (int64_t)sizeof(Nf4Mamba2) : struct_size(name);
}

}  // extern "C"
