/* Compact bfloat16 (compact.h): making it, and float32 activations times it. */
#include <omp.h>

#include "compact_gemm.h"
#include "cpu.h"
#include "isa.h"

namespace nf4 {
namespace {

/* The 16 bytes that come most often, zero among them, because exceptions count as zero. */
void choose_high_bytes(const uint16_t* w, int64_t count, uint8_t* high_bytes) {
  int64_t times[256] = {};
  for (int64_t i = 0; i < count; ++i) ++times[w[i] >> 8];
  times[0] = count + 1;
  for (int code = 0; code < 16; ++code) {
    int most = 0;
    for (int byte = 1; byte < 256; ++byte) {
      if (times[byte] > times[most]) most = byte;
    }
    high_bytes[code] = (uint8_t)most;
    times[most] = -1;
  }
}

struct Exceptions {
  int32_t* columns;
  uint16_t* values;
  int64_t most, count;
  bool add(int64_t column, uint16_t value) {
    if (count == most) return false;
    columns[count] = (int32_t)column;
    values[count++] = value;
    return true;
  }
};

bool pack_row(const uint16_t* row, int64_t k, const int* codes, uint8_t* group, Exceptions& exceptions) {
  for (int64_t g = 0; g < k; g += kCompactColumns, group += kCompactGroup) {
    for (int i = 0; i < 16; ++i) group[32 + i] = 0;
    for (int64_t c = 0; c < kCompactColumns; ++c) {
      uint16_t value = row[g + c];
      if (codes[value >> 8] < 0) {
        if (!exceptions.add(g + c, value)) return false;
        value = 0;
      }
      const int64_t place = compact_place(c);
      group[place] = (uint8_t)value;
      group[32 + place % 16] |= (uint8_t)(codes[value >> 8] << (place < 16 ? 0 : 4));
    }
  }
  return true;
}

using Gemm = CompactGemm;

/* Up to kDotRows rows of x times a unit, without exceptions. */
void multiply(const Gemm& p, int64_t m0, int count, int64_t row0, int rows, ThreadScratch& scratch, float* sums) {
  const Prepared* x = p.x;
  float* panel = scratch.panel.floats((size_t)(kPanelRows * x->stride));
  if (p.kernels->compact_rows) return p.kernels->compact_rows(p.w, x, m0, count, row0, rows, panel, sums);
  const int64_t groups = x->k / kCompactColumns;
  for (int first = 0; first < rows; first += kPanelRows) {
    const int some = rows - first < kPanelRows ? rows - first : kPanelRows;
    for (int64_t i = 0; i < some * groups; ++i) {
      const int64_t group = (row0 + first) * groups + i;
      expand_group(p.w->groups + group * kCompactGroup, p.w->high_bytes, panel + i * kCompactColumns);
    }
    p.kernels->dot(panel, some, x, m0, count, sums + first);
  }
}

void add_exceptions(const Gemm& p, int64_t m0, int count, int64_t row0, int rows, float* sums) {
  const CompactBf16* w = p.w;
  if (!w->first) return;
  for (int r = 0; r < rows; ++r) {
    for (int32_t i = w->first[row0 + r]; i < w->first[row0 + r + 1]; ++i) {
      const float value = from_bf16(w->values[i]);
      for (int m = 0; m < count; ++m) sums[m * kUnit + r] += value * p.x->x[(m0 + m) * p.x->stride + w->columns[i]];
    }
  }
}

}  // namespace

void compact_order(const Kernels* kernels, Prepared& x, ThreadScratch& scratch) {
  if (!kernels->compact_rows) return;
  float* order = scratch.order.floats((size_t)(x.m * x.k));
  kernels->bf16_order(&x, order);
  x.order = order;
}

void compact_unit(const CompactGemm& p, int64_t m0, int count, int64_t row0, int rows, ThreadScratch& scratch) {
  alignas(64) float sums[kDotRows * kUnit];
  multiply(p, m0, count, row0, rows, scratch, sums);
  add_exceptions(p, m0, count, row0, rows, sums);
  p.kernels->emit(sums, p.bias, p.out, NF4_FLOAT32, p.n, m0, count, row0, rows);
}

namespace {

void linear(Gemm p, const float* from, int64_t m, int64_t k, int threads) {
  Tasks tasks(round_up(p.n, kUnit) / kUnit, m, threads, k * 4);
  if (threads > tasks.count()) threads = (int)tasks.count();
  ThreadScratch& shared = ThreadScratch::mine();
  XInput input(from, NF4_FLOAT32, m, k, shared.x);
  p.x = &input.prepared;
  compact_order(p.kernels, input.prepared, shared);
  TaskQueue& queue = TaskQueue::begin(tasks.count(), threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    ThreadScratch& scratch = ThreadScratch::mine();
    const int id = omp_get_thread_num();
    for (int64_t t; (t = queue.take(id)) >= 0;) {
      const int64_t row0 = tasks.unit(t) * kUnit, last = tasks.m_end(t);
      const int rows = (int)(p.n - row0 < kUnit ? p.n - row0 : kUnit);
      for (int64_t m0 = tasks.m_begin(t); m0 < last; m0 += kDotRows) {
        const int count = (int)(last - m0 < kDotRows ? last - m0 : kDotRows);
        compact_unit(p, m0, count, row0, rows, scratch);
      }
    }
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" {

int64_t nf4_cpu_compact_bf16(const uint16_t* w, int64_t n, int64_t k, uint8_t* groups, uint8_t* high_bytes,
                             int32_t* first, int32_t* columns, uint16_t* values, int64_t most) {
  if (!w || !groups || !high_bytes || !first || n < 1 || k < 1 || k % kCompactColumns || most < 0) return -1;
  choose_high_bytes(w, n * k, high_bytes);
  int codes[256];
  for (int& code : codes) code = -1;
  for (int code = 0; code < 16; ++code) codes[high_bytes[code]] = code;
  Exceptions exceptions{columns, values, most, 0};
  for (int64_t row = 0; row < n; ++row) {
    first[row] = (int32_t)exceptions.count;
    if (!pack_row(w + row * k, k, codes, groups + row * (k / kCompactColumns * kCompactGroup), exceptions)) return -1;
  }
  first[n] = (int32_t)exceptions.count;
  return exceptions.count;
}

int nf4_cpu_linear_compact(const float* x, const uint8_t* groups, const uint8_t* high_bytes, const int32_t* first,
                           const int32_t* columns, const uint16_t* values, const float* bias, float* out, int64_t m,
                           int64_t n, int64_t k, int32_t threads) {
  if (!x || !groups || !high_bytes || !out || m < 0 || n < 1 || k < 1 || k % kCompactColumns) return 1;
  if (first && (!columns || !values)) return 1;
  if (!m) return 0;
  Stopwatch watch(linear_ns);
  const CompactBf16 w{groups, high_bytes, first, columns, values};
  linear(Gemm{active_kernels(), &w, bias, out, n, nullptr}, x, m, k, threads < 1 ? 1 : threads);
  return 0;
}

}  // extern "C"
