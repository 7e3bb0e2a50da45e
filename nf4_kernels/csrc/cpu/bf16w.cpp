/* float32 activations times weights stored as bfloat16: the output head of a model whose head is not quantized. */
#include <omp.h>

#include "cpu.h"
#include "isa.h"
#include "linear.h"

namespace nf4 {
namespace {

using Gemm = GemmWith<uint16_t>;

void emit(const Gemm& p, const float* sums, int64_t m0, int count, int64_t row0, int rows) {
  p.kernels->emit(sums, p.bias, p.out, NF4_FLOAT32, p.n, m0, count, row0, rows);
}

/* Widened to float32 rows, which all rows of x use from L1. */
void run_panel(const Gemm& p, int64_t row0, int rows, int64_t m_begin, int64_t m_end, ThreadScratch& scratch) {
  alignas(64) float sums[kDotRows * kUnit];
  const int64_t stride = p.x->stride;
  float* panel = scratch.panel.floats((size_t)(kPanelRows * stride));
  for (int first = 0; first < rows; first += kPanelRows) {
    int some = rows - first < kPanelRows ? rows - first : kPanelRows;
    for (int j = 0; j < some; ++j) {
      p.kernels->widen(p.w + (row0 + first + j) * p.x->k, panel + j * stride, p.x->k, stride);
    }
    for (int64_t m0 = m_begin; m0 < m_end; m0 += kDotRows) {
      int count = (int)(m_end - m0 < kDotRows ? m_end - m0 : kDotRows);
      p.kernels->dot(panel, some, p.x, m0, count, sums);
      emit(p, sums, m0, count, row0 + first, some);
    }
  }
}

/* Widened in registers, eight rows of x at a time: the weights come from memory once and from L1 after that. */
void run_rows(const Gemm& p, int64_t row0, int rows, int64_t m_begin, int64_t m_end) {
  alignas(64) float sums[8 * kUnit];
  for (int64_t m0 = m_begin; m0 < m_end; m0 += 8) {
    int count = (int)(m_end - m0 < 8 ? m_end - m0 : 8);
    p.kernels->bf16_rows(p.w, p.x, m0, count, row0, rows, sums);
    emit(p, sums, m0, count, row0, rows);
  }
}

/* Whole units are matrix tiles as they lie in memory. */
void run_tiles(const Gemm& p, int64_t row0, int64_t m_begin, int64_t m_end) {
  alignas(64) float sums[kTileRows * kUnit];
  for (int64_t m0 = m_begin; m0 < m_end; m0 += kTileRows) {
    int count = (int)(m_end - m0 < kTileRows ? m_end - m0 : kTileRows);
    p.kernels->tiles_bf16(p.w + row0 * p.x->k, p.x, m0 / 16, count > 16 ? 2 : 1, sums);
    emit(p, sums, m0, count, row0, kUnit);
  }
}

void linear_bf16w(Gemm p, Path path, const float* from, int64_t m, int64_t k, int threads) {
  Tasks tasks(round_up(p.n, kUnit) / kUnit, m, threads, k * 4);
  if (threads > tasks.count()) threads = (int)tasks.count();
  ThreadScratch& shared = ThreadScratch::mine();
  XInput input(from, NF4_FLOAT32, m, k, shared.x);
  Prepared& x = input.prepared;
  p.x = &x;
  void* order = nullptr;
  if (path == Path::kFused) order = shared.order.reserve((size_t)(m * k) * sizeof(float));
  if (path == Path::kTiles) order = shared.order.reserve(tile_order_bytes(m, k, true));
  x.order = order;
  input.convert(0, 1);
  if (path == Path::kFused) p.kernels->bf16_order(&x, static_cast<float*>(order));
  if (path == Path::kTiles) {
    for (int64_t t = 0; t < (m + 15) / 16; ++t) p.kernels->tiles_order(&x, t, true, true, order);
  }
  TaskQueue& queue = TaskQueue::begin(tasks.count(), threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    ThreadScratch& scratch = ThreadScratch::mine();
    const int id = omp_get_thread_num();
    if (path == Path::kTiles) p.kernels->tiles_begin();
    for (int64_t t; (t = queue.take(id)) >= 0;) {
      int64_t row0 = tasks.unit(t) * kUnit;
      int rows = (int)(p.n - row0 < kUnit ? p.n - row0 : kUnit);
      if (path == Path::kTiles && rows == kUnit) {
        run_tiles(p, row0, tasks.m_begin(t), tasks.m_end(t));
      } else if (path == Path::kFused) {
        run_rows(p, row0, rows, tasks.m_begin(t), tasks.m_end(t));
      } else {
        run_panel(p, row0, rows, tasks.m_begin(t), tasks.m_end(t), scratch);
      }
    }
    if (path == Path::kTiles) p.kernels->tiles_end();
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" int nf4_cpu_linear_bf16w(const float* x, const uint16_t* w, const float* bias, float* out, int64_t m,
                                    int64_t n, int64_t k, int32_t threads) {
  if (!x || !w || !out || m < 0 || n < 1 || k < 1) return 1;
  if (!m) return 0;
  Stopwatch watch(linear_ns);
  const Kernels* kernels = active_kernels();
  Path path = Path::kPanel;
  if (k % 32 == 0 && kernels->bf16_rows) path = Path::kFused;
  if (k % 32 == 0 && kernels->bf16_tiles_from && m >= kernels->bf16_tiles_from) path = Path::kTiles;
  linear_bf16w(Gemm{kernels, w, bias, out, n, nullptr}, path, x, m, k, threads < 1 ? omp_get_max_threads() : threads);
  return 0;
}
