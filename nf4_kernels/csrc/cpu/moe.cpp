/* GEMMs of mixtures of experts: tokens are sorted by expert, and the chosen experts' GEMMs run side by side. */
#include <omp.h>

#include <vector>

#include "cpu.h"
#include "isa.h"
#include "linear.h"
#include "moe_outputs.h"

namespace nf4 {
namespace {

/* One chosen expert's GEMM. */
struct Job {
  Nf4Linear p;         /* x stays null: its rows are gathered */
  Prepared x;
  float* rows;         /* x.x, to be filled */
  void* order;
  Path path;
  Tasks tasks;
  int64_t first_task;  /* of the tasks of all jobs */
  const int64_t* choices;
};

struct Call {
  const Nf4Weight* w;
  const void* bias;
  const void* x;
  int64_t count, top_k;
  bool per_choice;
  int32_t dtype;
  int64_t width() const { return dtype == NF4_FLOAT32 ? 4 : 2; }
  bool split() const { return dtype != NF4_BFLOAT16; }
};

Nf4Weight expert_of(const Nf4Weight& w, int64_t expert) {
  Nf4Weight own = w;
  const int64_t blocks = w.n * w.k / w.blocksize;
  own.packed += expert * (w.n * w.k / 2);
  if (!w.absmax_8bit) {
    own.absmax += expert * blocks;
    return own;
  }
  own.absmax_8bit += expert * blocks;
  own.absmax += expert * (blocks / 256);
  own.absmax_offset += expert * (blocks / 256) * w.offset_stride;
  return own;
}

/* Choices in the order of their experts: first[e] ... first[e + 1] are those of expert e. */
struct Sorted {
  std::vector<int64_t> first, choices, place; /* place: of a choice among the sorted ones, -1 where it has no expert */
  Sorted(const int32_t* experts, int64_t total, int64_t count) : first(count + 1), choices(total), place(total, -1) {
    auto valid = [&](int64_t i) { return experts[i] >= 0 && experts[i] < count; };
    for (int64_t i = 0; i < total; ++i) {
      if (valid(i)) ++first[experts[i] + 1];
    }
    for (int64_t e = 0; e < count; ++e) first[e + 1] += first[e];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < total; ++i) {
      if (valid(i)) choices[place[i] = next[experts[i]]++] = i;
    }
  }
};

std::vector<Job> jobs_of(const Kernels* kernels, const Call& c, const Sorted& sorted, char* sums, int threads) {
  std::vector<Job> jobs;
  for (int64_t e = 0; e < c.count; ++e) {
    const int64_t m = sorted.first[e + 1] - sorted.first[e];
    if (!m) continue;
    Nf4Linear p{};
    p.weight = expert_of(*c.w, e);
    p.bias = c.bias ? static_cast<const char*>(c.bias) + e * c.w->n * c.width() : nullptr;
    p.out = sums + sorted.first[e] * c.w->n * c.width();
    p.m = m;
    p.dtype = c.dtype;
    Tasks tasks(round_up(c.w->n, kUnit) / kUnit, m, 1, c.w->k * 4);
    jobs.push_back({p, {nullptr, round_up(c.w->k, 16), nullptr, m, c.w->k}, nullptr, nullptr,
                    choose_path(kernels, &p, 1), tasks, 0, sorted.choices.data() + sorted.first[e]});
  }
  if (jobs.size() == 1) jobs[0].tasks = Tasks(jobs[0].tasks.units, jobs[0].p.m, threads, c.w->k * 4);
  int64_t task = 0;
  for (Job& job : jobs) {
    job.first_task = task;
    task += job.tasks.count();
  }
  return jobs;
}

/* Memory for the jobs' rows of x, as they are and in the order of their kernels. */
void place_rows(const Call& c, std::vector<Job>& jobs, ThreadScratch& shared) {
  auto order_bytes = [&](const Job& job) -> size_t {
    if (job.path == Path::kFused) return (size_t)round_up(job.x.m * job.x.k * 4, 64);
    return job.path == Path::kTiles ? round_up((int64_t)tile_order_bytes(job.x.m, job.x.k, c.split()), 64) : 0;
  };
  int64_t floats = 0;
  size_t bytes = 0;
  for (const Job& job : jobs) {
    floats += job.x.m * job.x.stride;
    bytes += order_bytes(job);
  }
  float* rows = shared.x.floats((size_t)floats);
  char* order = static_cast<char*>(shared.order.reserve(bytes + 64));
  for (Job& job : jobs) {
    job.x.x = job.rows = rows;
    rows += job.x.m * job.x.stride;
    if (job.path != Path::kPanel) job.x.order = job.order = order;
    order += order_bytes(job);
  }
}

void gather(const Kernels* kernels, const Call& c, const Job& job) {
  for (int64_t i = 0; i < job.x.m; ++i) {
    const int64_t choice = job.choices[i], row = c.per_choice ? choice : choice / c.top_k;
    float* to = job.rows + i * job.x.stride;
    for (int64_t k = 0; k < job.x.k; ++k) to[k] = load_as(c.x, row * job.x.k + k, c.dtype);
    for (int64_t k = job.x.k; k < job.x.stride; ++k) to[k] = 0;
  }
  order_x(kernels, job.path, job.x, job.order, c.split(), 0, 1);
}

void run_task(const Kernels* kernels, const Call& c, const std::vector<Job>& jobs, int64_t task, bool timed) {
  size_t low = 0, high = jobs.size();
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    (jobs[middle].first_task <= task ? low : high) = middle;
  }
  const Job& job = jobs[low];
  const int64_t t = task - job.first_task, row0 = job.tasks.unit(t) * kUnit, left = c.w->n - row0;
  Unit unit{&job.p, row0, (int)(left < kUnit ? left : kUnit), job.tasks.m_begin(t), job.tasks.m_end(t), timed};
  run_unit(kernels, job.path, job.x, unit, c.split(), ThreadScratch::mine());
}

void run(const Call& c, const int32_t* experts, const MoeOutputs& outputs, int64_t tokens, int threads) {
  const Kernels* kernels = active_kernels();
  ThreadScratch& shared = ThreadScratch::mine();
  const Sorted sorted(experts, tokens * c.top_k, c.count);
  char* sums = static_cast<char*>(shared.outputs.reserve((size_t)(tokens * c.top_k * c.w->n * c.width())));
  std::vector<Job> jobs = jobs_of(kernels, c, sorted, sums, threads);
  place_rows(c, jobs, shared);
  const int64_t tasks = jobs.empty() ? 0 : jobs.back().first_task + jobs.back().tasks.count();
  bool tiles = false;
  for (const Job& job : jobs) tiles |= job.path == Path::kTiles;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const bool timed = omp_get_thread_num() == 0;
#pragma omp for schedule(dynamic)
    for (size_t j = 0; j < jobs.size(); ++j) gather(kernels, c, jobs[j]);
    if (tiles) kernels->tiles_begin();
#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < tasks; ++task) run_task(kernels, c, jobs, task, timed);
    if (tiles) kernels->tiles_end();
#pragma omp for
    for (int64_t token = 0; token < tokens; ++token) outputs.write(sums, sorted.place.data(), token);
  }
}

}  // namespace
}  // namespace nf4

using namespace nf4;

extern "C" int nf4_cpu_moe(const Nf4Weight* w, const void* bias, const void* x, const int32_t* experts,
                           const float* routing, void* out, int64_t count, int64_t tokens, int64_t top_k,
                           int32_t per_choice, int32_t dtype, int32_t activation, int32_t threads) {
  if (!valid_weight(w) || !x || !experts || !out || count < 1 || tokens < 0 || top_k < 1) return 1;
  if (dtype < NF4_FLOAT32 || dtype > NF4_BFLOAT16 || activation < 0 || activation > kSwigluOai) return 1;
  if (w->n * w->k % w->blocksize || (activation && (w->n % 2 || routing))) return 1;
  if (w->absmax_8bit && w->n * w->k / w->blocksize % 256) return 1;
  Stopwatch watch(linear_ns);
  const Call call{w, bias, x, count, top_k, per_choice != 0, dtype};
  const MoeOutputs outputs{routing, out, top_k, w->n, dtype, activation};
  if (tokens) run(call, experts, outputs, tokens, threads < 1 ? 1 : threads);
  return 0;
}
