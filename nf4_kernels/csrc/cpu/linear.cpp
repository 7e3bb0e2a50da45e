/* GEMMs with NF4 weights: the choice of path, the preparation of x and the loop over row blocks. */
#include "linear.h"

#include <omp.h>

#include "cpu.h"
#include "isa.h"

namespace nf4 {

ThreadScratch& ThreadScratch::mine() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

XInput::XInput(const void* x, int32_t dtype, int64_t m, int64_t k, Scratch& scratch) : from_(x), dtype_(dtype) {
  prepared = {static_cast<const float*>(x), k, nullptr, m, k};
  if (dtype == NF4_FLOAT32 && k % 16 == 0) return;
  prepared.stride = round_up(k, 16);
  prepared.x = copy_ = scratch.floats((size_t)(m * prepared.stride));
}

void XInput::convert(int id, int threads) const {
  if (!copy_) return;
  Share share(prepared.m, id, threads);
  const int64_t k = prepared.k;
  for (int64_t i = share.begin; i < share.end; ++i) {
    float* to = copy_ + i * prepared.stride;
    if (dtype_ == NF4_BFLOAT16) {
      const uint16_t* from = static_cast<const uint16_t*>(from_) + i * k;
      for (int64_t c = 0; c < k; ++c) to[c] = from_bf16(from[c]);
    } else {
      for (int64_t c = 0; c < k; ++c) to[c] = load_as(from_, i * k + c, dtype_);
    }
    for (int64_t c = k; c < prepared.stride; ++c) to[c] = 0;
  }
}

Tasks::Tasks(int64_t units_, int64_t m_, int64_t threads, int64_t row_bytes) : units(units_), m(m_) {
  constexpr int64_t kRangeBytes = 768 << 10;
  constexpr int64_t kLeastRows = 4 * kTileRows; /* fewer would decode more than they multiply */
  int64_t most = kRangeBytes / row_bytes / kTileRows * kTileRows;
  if (most < kLeastRows) most = kLeastRows;
  int64_t wanted = (m + most - 1) / most;
  if (units * wanted < threads) wanted = (threads + units - 1) / units;
  rows_per_range = round_up((m + wanted - 1) / wanted, kTileRows);
  ranges = (m + rows_per_range - 1) / rows_per_range;
}

/* Blocks of 64 columns that lie in one quantization block each: what the fused and the tile kernels need. */
static bool regular(const Nf4Weight& w) { return w.k % 64 == 0 && w.blocksize % 64 == 0; }

Path choose_path(const Kernels* kernels, const Nf4Linear* ps, int count) {
  for (int i = 0; i < count; ++i) {
    if (!regular(ps[i].weight)) return Path::kPanel;
  }
  if (ps->m <= kernels->fused_rows) return Path::kFused;
  if (kernels->tiles_from && ps->m >= kernels->tiles_from) return Path::kTiles;
  return Path::kPanel;
}

namespace {

void emit(const Kernels* kernels, const Unit& u, const float* sums, int64_t m0, int count, int64_t row0, int rows) {
  kernels->emit(sums, u.p->bias, u.p->out, u.p->dtype, u.p->weight.n, m0, count, row0, rows);
}

void run_fused(const Kernels* kernels, const Prepared& x, const Unit& u, ThreadScratch& scratch) {
  alignas(64) float sums[16 * kUnit];
  float* small = scratch.small.floats((size_t)(kUnit * (x.k / 64) + 64));
  kernels->fused(&u.p->weight, &x, u.row0, u.rows, small, sums);
  emit(kernels, u, sums, 0, (int)x.m, u.row0, u.rows);
}

void run_panel(const Kernels* kernels, const Prepared& x, const Unit& u, ThreadScratch& scratch) {
  alignas(64) float sums[kDotRows * kUnit];
  float* panel = scratch.panel.floats((size_t)(kPanelRows * x.stride));
  for (int first = 0; first < u.rows; first += kPanelRows) {
    int rows = u.rows - first < kPanelRows ? u.rows - first : kPanelRows;
    int64_t start = u.timed ? now_ns() : 0;
    for (int j = 0; j < rows; ++j) {
      int64_t begin = (u.row0 + first + j) * x.k;
      float* to = panel + j * x.stride;
      kernels->decode(&u.p->weight, begin, begin + x.k, to, NF4_FLOAT32);
      for (int64_t c = x.k; c < x.stride; ++c) to[c] = 0;
    }
    if (u.timed) dequant_ns.fetch_add(now_ns() - start, std::memory_order_relaxed);
    for (int64_t m0 = u.m_begin; m0 < u.m_end; m0 += kDotRows) {
      int count = (int)(u.m_end - m0 < kDotRows ? u.m_end - m0 : kDotRows);
      kernels->dot(panel, rows, &x, m0, count, sums);
      emit(kernels, u, sums, m0, count, u.row0 + first, rows);
    }
  }
}

void run_tiles_fused(const Kernels* kernels, const Prepared& x, const Unit& u, bool split, ThreadScratch& scratch) {
  alignas(64) float sums[kTileRows * kUnit];
  float* small = scratch.small.floats((size_t)(kUnit * (x.k / 64) + 64));
  kernels->tiles_fused(&u.p->weight, &x, u.row0, u.rows, split, small, scratch.panel.reserve(16384), sums);
  emit(kernels, u, sums, 0, (int)x.m, u.row0, u.rows);
}

/* 64 kGroups columns of a unit are decoded at a time: that panel (24 KiB) stays in L1 while kBlock rows of x pass by,
 * whose results (64 KiB) wait in L2 for the next columns. */
void run_tiles(const Kernels* kernels, const Prepared& x, const Unit& u, bool split, ThreadScratch& scratch) {
  constexpr int64_t kGroups = 3, kBlock = 512, kResult = 4 * 256;
  alignas(64) float sums[kTileRows * kUnit];
  float* small = scratch.small.floats((size_t)(kUnit * (x.k / 64) + 64));
  float* results = scratch.panel.floats(kGroups * 64 * kUnit + kBlock / kTileRows * kResult);
  float* panel = results + kBlock / kTileRows * kResult;
  const int64_t groups = x.k / 64;
  for (int64_t first = u.m_begin; first < u.m_end; first += kBlock) {
    const int64_t last = first + kBlock < u.m_end ? first + kBlock : u.m_end;
    auto columns = [&](int64_t m0) { return last - m0 > 16 ? 2 : 1; };
    for (int64_t begin = 0; begin < groups; begin += kGroups) {
      const int64_t end = begin + kGroups < groups ? begin + kGroups : groups;
      int64_t start = u.timed ? now_ns() : 0;
      kernels->tiles_decode(&u.p->weight, u.row0, u.rows, begin, end, split, small, panel);
      if (u.timed) dequant_ns.fetch_add(now_ns() - start, std::memory_order_relaxed);
      float* to = results;
      for (int64_t m0 = first; m0 < last; m0 += kTileRows, to += kResult) {
        kernels->tiles_multiply(panel, &x, m0 / 16, columns(m0), begin, end, split, to);
      }
    }
    const float* from = results;
    for (int64_t m0 = first; m0 < last; m0 += kTileRows, from += kResult) {
      int count = (int)(last - m0 < kTileRows ? last - m0 : kTileRows);
      kernels->tiles_sums(from, columns(m0), sums);
      emit(kernels, u, sums, m0, count, u.row0, u.rows);
    }
  }
}

}  // namespace

void order_x(const Kernels* kernels, Path path, const Prepared& x, void* order, bool split, int id, int threads) {
  if (path == Path::kFused && id == 0) kernels->fused_order(&x, static_cast<float*>(order));
  if (path != Path::kTiles) return;
  Share share((x.m + 15) / 16, id, threads);
  for (int64_t t = share.begin; t < share.end; ++t) kernels->tiles_order(&x, t, split, false, order);
}

void run_unit(const Kernels* kernels, Path path, const Prepared& x, const Unit& u, bool split, ThreadScratch& scratch) {
  if (path == Path::kFused) run_fused(kernels, x, u, scratch);
  if (path == Path::kPanel) run_panel(kernels, x, u, scratch);
  if (path == Path::kTiles && x.m <= kTileRows) run_tiles_fused(kernels, x, u, split, scratch);
  if (path == Path::kTiles && x.m > kTileRows) run_tiles(kernels, x, u, split, scratch);
}

namespace {

void run_tasks(const Kernels* kernels, Path path, const Nf4Linear* ps, const Prepared& x, const Tasks& tasks,
               bool split, int id, TaskQueue& queue) {
  ThreadScratch& scratch = ThreadScratch::mine();
  for (int64_t t; (t = queue.take(id)) >= 0;) {
    const int64_t unit = tasks.unit(t);
    const Nf4Linear* p = ps;
    int64_t first_unit = 0; /* of GEMM p */
    for (int64_t units; unit >= first_unit + (units = round_up(p->weight.n, kUnit) / kUnit); ++p) first_unit += units;
    int64_t row0 = (unit - first_unit) * kUnit;
    int64_t left = p->weight.n - row0;
    Unit u{p, row0, (int)(left < kUnit ? left : kUnit), tasks.m_begin(t), tasks.m_end(t), id == 0};
    run_unit(kernels, path, x, u, split, scratch);
  }
}

bool valid_group(const Nf4Linear* ps, int count) {
  if (!ps || count < 1) return false;
  for (int i = 0; i < count; ++i) {
    const Nf4Linear& p = ps[i];
    if (!valid_weight(&p.weight) || !p.x || !p.out || p.m < 0) return false;
    if (p.dtype < NF4_FLOAT32 || p.dtype > NF4_BFLOAT16) return false;
    if (p.x != ps->x || p.m != ps->m || p.weight.k != ps->weight.k || p.dtype != ps->dtype) return false;
  }
  return true;
}

void linear_group(const Nf4Linear* ps, int count, int threads) {
  const Kernels* kernels = active_kernels();
  const Path path = choose_path(kernels, ps, count);
  /* bfloat16 activations are exact in one part, and round the weights to their own precision. */
  const bool split = ps->dtype != NF4_BFLOAT16;
  int64_t units = 0;
  for (int i = 0; i < count; ++i) units += round_up(ps[i].weight.n, kUnit) / kUnit;
  const int64_t row_bytes = ps->weight.k * (path == Path::kTiles && kernels->fixed_point ? 2 : 4);
  Tasks tasks(units, ps->m, path == Path::kFused ? 1 : threads, row_bytes);
  if (threads > tasks.count()) threads = (int)tasks.count();

  ThreadScratch& shared = ThreadScratch::mine();
  XInput input(ps->x, ps->dtype, ps->m, ps->weight.k, shared.x);
  Prepared& x = input.prepared;
  void* order = nullptr;
  if (path == Path::kFused) order = shared.order.reserve((size_t)(x.m * x.k) * sizeof(float));
  if (path == Path::kTiles) order = shared.order.reserve(tile_order_bytes(x.m, x.k, split));
  x.order = order;

  /* A small x is prepared before the threads start: that saves two barriers. */
  const bool ahead = x.m * x.k <= 16384 || threads == 1;
  if (ahead) {
    input.convert(0, 1);
    order_x(kernels, path, x, order, split, 0, 1);
  }
  TaskQueue& queue = TaskQueue::begin(tasks.count(), threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int id = omp_get_thread_num(), team = omp_get_num_threads();
    if (!ahead) {
      if (input.copies()) {
        input.convert(id, team);
#pragma omp barrier
      }
      order_x(kernels, path, x, order, split, id, team);
#pragma omp barrier
    }
    if (path == Path::kTiles) kernels->tiles_begin();
    run_tasks(kernels, path, ps, x, tasks, split, id, queue);
    if (path == Path::kTiles) kernels->tiles_end();
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" {

int nf4_cpu_linear_group(const Nf4Linear* ps, int32_t count, int32_t threads) {
  if (!valid_group(ps, count)) return 1;
  Stopwatch watch(linear_ns);
  if (ps->m) linear_group(ps, count, threads < 1 ? omp_get_max_threads() : threads);
  return 0;
}

int nf4_cpu_linear(const Nf4Linear* p, int32_t threads) { return nf4_cpu_linear_group(p, 1, threads); }

}  // extern "C"
