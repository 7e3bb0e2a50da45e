/* The output layer for greedy sampling: the largest of its results is exact, and so is whatever could be it (screening.h). */
#include "screening.h"

#include <math.h>
#include <omp.h>

#include "compact_gemm.h"
#include "cpu.h"
#include "isa.h"

namespace nf4 {
namespace {

constexpr float kUp = 1.000001f;
/* Larger results than this could overflow where bounds are computed. */
constexpr float kMostResult = 1e30f;
/* What is added to a norm, because smaller ones lose bits in float32. */
constexpr float kLeastNorm = 0x1p-126f;
/* Of more columns a sum of products could leave 32 bits: rounding adds up to half a step each to 2^24 steps. */
constexpr int64_t kMostColumns = 1 << 18;

/* x [m, k] in 16 bits, in memory of its own. */
class InSixteenBits {
 public:
  InSixteenBits(const float* from, int64_t m, int64_t k, Scratch& scratch) : m_(m), k_(k) {
    steps_ = scratch.floats((size_t)(3 * m + (m * k + 1) / 2));
    codes_ = (int16_t*)(steps_ + 3 * m);
    for (int64_t i = 0; i < m; ++i) convert(from + i * k, i);
  }
  ScreenedX get() const { return {codes_, steps_, steps_ + m_, steps_ + 2 * m_, m_, k_}; }
  /* Whether every row's norm is smaller; false where something in x is not finite. */
  bool is_below(float norm) const {
    for (int64_t i = 0; i < m_; ++i) {
      if (!(steps_[m_ + i] < norm)) return false;
    }
    return true;
  }

 private:
  void convert(const float* x, int64_t i) {
    double sum = 0, squares = 0, rest = 0;
    float largest = 0.0f;
    for (int64_t c = 0; c < k_; ++c) {
      const float magnitude = fabsf(x[c]);
      sum += magnitude;
      squares += (double)x[c] * x[c];
      largest = magnitude > largest ? magnitude : largest;
    }
    /* 32767 is the most that 16 bits hold; 128 times the sum of all must fit 32. */
    const float by_each = largest / 32767.0f, by_sum = (float)(sum * 0x1p-24);
    const float step = by_each > by_sum ? by_each : by_sum;
    const float inverse = step < 1.17549435e-38f ? 0.0f : 1.0f / step;
    int16_t* codes = codes_ + i * k_;
    if (isfinite(squares)) {
      for (int64_t c = 0; c < k_; ++c) {
        codes[c] = (int16_t)lrintf(x[c] * inverse);
        const double left = x[c] - (double)step * codes[c];
        rest += left * left;
      }
    }
    steps_[i] = step;
    steps_[m_ + i] = (float)sqrt(squares) * kUp + kLeastNorm;
    steps_[2 * m_ + i] = (float)sqrt(rest) * kUp + kLeastNorm;
  }

  int64_t m_, k_;
  float* steps_; /* [3, m]: steps, norms, rests */
  int16_t* codes_;
};

/* Where each unit of rows has its largest result at most, and the least that the largest of all is. */
struct Bounds {
  float* upper; /* [units, m] */
  float* lower; /* [threads, m] */
  int64_t m;
  float least(int64_t i, int threads) const {
    float most = lower[i];
    for (int t = 1; t < threads; ++t) most = lower[t * m + i] > most ? lower[t * m + i] : most;
    return most;
  }
};

struct Units {
  int64_t n;
  int64_t count() const { return round_up(n, kUnit) / kUnit; }
  int rows(int64_t unit) const { return (int)(n - unit * kUnit < kUnit ? n - unit * kUnit : kUnit); }
};

void screen(const CompactGemm& p, const Screening* w, const ScreenedX& x, const Bounds& bounds, TaskQueue& queue, int id) {
  const Units units{p.n};
  float lower[kDotRows];
  float* least = bounds.lower + id * x.m;
  for (int64_t i = 0; i < x.m; ++i) least[i] = -INFINITY;
  for (int64_t t; (t = queue.take(id)) >= 0;) {
    p.kernels->screen_rows(w, &x, p.bias, t * kUnit, units.rows(t), p.out, p.n, lower, bounds.upper + t * x.m);
    for (int64_t i = 0; i < x.m; ++i) least[i] = lower[i] > least[i] ? lower[i] : least[i];
  }
}

void compute_candidates(const CompactGemm& p, const Bounds& bounds, int id, int threads, ThreadScratch& scratch) {
  const Units units{p.n};
  const Share share(units.count(), id, threads);
  for (int64_t i = 0; i < bounds.m; ++i) {
    const float least = bounds.least(i, threads);
    for (int64_t t = share.begin; t < share.end; ++t) {
      if (bounds.upper[t * bounds.m + i] < least) continue;
      compact_unit(p, i, 1, t * kUnit, units.rows(t), scratch);
    }
  }
}

/* False where it cannot be done for these numbers. */
bool largest(CompactGemm p, const Screening* w, float most_norm, const float* from, int64_t m, int64_t k, int threads) {
  const Units units{p.n};
  if (!p.kernels->screen_rows || m > kDotRows || k > kMostColumns) return false;
  if (threads > units.count()) threads = (int)units.count();
  ThreadScratch& shared = ThreadScratch::mine();
  const InSixteenBits converted(from, m, k, shared.small);
  if (!converted.is_below(kMostResult / most_norm)) return false;
  const ScreenedX screened = converted.get();
  XInput input(from, NF4_FLOAT32, m, k, shared.x);
  p.x = &input.prepared;
  compact_order(p.kernels, input.prepared, shared);
  float* memory = shared.outputs.floats((size_t)((units.count() + threads) * m));
  const Bounds bounds{memory, memory + units.count() * m, m};
  TaskQueue& queue = TaskQueue::begin(units.count(), threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int id = omp_get_thread_num();
    /* The runtime may give fewer threads than were asked for. */
    const int count = omp_get_num_threads();
    screen(p, w, screened, bounds, queue, id);
#pragma omp barrier
    compute_candidates(p, bounds, id, count, ThreadScratch::mine());
  }
  return true;
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" int nf4_cpu_largest_compact(const float* x, const uint8_t* groups, const uint8_t* high_bytes,
                                       const int32_t* first, const int32_t* columns, const uint16_t* values,
                                       const int8_t* codes, const float* scales, const float* norms,
                                       const float* errors, float most_norm, const float* bias, float* out, int64_t m,
                                       int64_t n, int64_t k, int32_t threads) {
  if (!x || !codes || !scales || !norms || !errors || !out || !groups || !high_bytes) return 1;
  if (m < 0 || n < 1 || k < 1 || k % kCompactColumns || (first && (!columns || !values))) return 1;
  if (!m) return 0;
  {
    Stopwatch watch(linear_ns);
    const CompactBf16 compact{groups, high_bytes, first, columns, values};
    const Screening screening{codes, scales, norms, errors};
    const CompactGemm p{active_kernels(), &compact, bias, out, n, nullptr};
    if (largest(p, &screening, most_norm, x, m, k, threads < 1 ? 1 : threads)) return 0;
  }
  return nf4_cpu_linear_compact(x, groups, high_bytes, first, columns, values, bias, out, m, n, k, threads);
}
