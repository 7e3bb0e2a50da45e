// Attention over the paged cache on CPU, float32: one-token sequences here, chunks in chunk_cpu.h and chunk_amx.h.
// Compiled on first use for the machine's own instruction set.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "chunk_amx.h"
#include "chunk_cpu.h"

namespace {

// Below this many multiplications of chunks, or of single tokens, which wait for memory more, a second thread costs more than
// it saves.
constexpr int64_t kParallelWork = 400'000, kParallelSingles = 50'000;
// Query heads of one task of a chunk at most: more would fill the caches.
constexpr int64_t kSharers = 8;

// e^x for x <= 0, e^-87 below that; plain arithmetic, so that the compiler vectorizes the loop around it.
inline float exp_negative(float x) { return exp_in_range<float, int32_t>(std::max(x, -87.0f)); }

template <int kDim>
inline float dot(const float* a, const float* b, int64_t dim) {
  const int64_t count = kDim ? kDim : dim;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

template <int kDim>
inline void add_scaled(float* out, const float* row, float weight, int64_t dim) {
  const int64_t count = kDim ? kDim : dim;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] += weight * row[i];
}

void soften(float* scores, int64_t count, const PagedAttention& a, int64_t head) {
  for (int64_t i = 0; i < count; ++i) scores[i] *= a.scaling;
  if (a.softcap > 0.0f) {
    for (int64_t i = 0; i < count; ++i) scores[i] = a.softcap * std::tanh(scores[i] / a.softcap);
  }
  float most = a.sinks ? std::max(scores[0], a.sinks[head]) : scores[0];
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) most = std::max(most, scores[i]);
  float total = a.sinks ? exp_negative(a.sinks[head] - most) : 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_negative(scores[i] - most);
    total += scores[i];
  }
  const float share = 1.0f / total;
  for (int64_t i = 0; i < count; ++i) scores[i] *= share;
}

// Calls row(index, cache row) for every key of a sequence that its query sees, block by block: a division for every key
// would cost more than the multiplication.
template <typename Row>
inline void for_each_key(const PagedAttention& a, int64_t single, int64_t begin, int64_t end, Row row) {
  const int32_t* table = a.table(single);
  int64_t position = begin;
  for (int64_t block = begin / a.block_size; position < end; ++block) {
    const int64_t first = block * a.block_size, last = std::min(end, first + a.block_size);
    const int64_t offset = table[block] * a.block_size - first;
    for (; position < last; ++position) row(position - begin, (offset + position) * a.kv_heads);
  }
}

// The query heads of one sequence that belong to the key heads [first_head, last_head). All key heads of a token are
// read in turn, because they lie side by side.
template <int kDim>
void attend(const PagedAttention& a, int64_t single, int64_t first_head, int64_t last_head, std::vector<float>& buffer) {
  const int64_t group = a.heads / a.kv_heads, end = a.span(single)[2];
  const int64_t begin = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t count = end - begin;
  const int64_t first = first_head * group, last = last_head * group;
  if (static_cast<int64_t>(buffer.size()) < a.heads * count) buffer.resize(a.heads * count);
  float* const scores = buffer.data();
  const float* const query = a.query + single * a.query_token;
  for_each_key(a, single, begin, end, [&](int64_t i, int64_t row) {
    for (int64_t h = first_head; h < last_head; ++h) {
      const float* key = a.key_cache + (row + h) * a.key_dim;
      for (int64_t q = h * group; q < (h + 1) * group; ++q) {
        scores[q * count + i] = dot<kDim>(query + q * a.query_head, key, a.key_dim);
      }
    }
  });
  float* const out = a.out + single * a.heads * a.value_dim;
  std::fill(out + first * a.value_dim, out + last * a.value_dim, 0.0f);
  for (int64_t q = first; q < last; ++q) soften(scores + q * count, count, a, q);
  for_each_key(a, single, begin, end, [&](int64_t i, int64_t row) {
    for (int64_t h = first_head; h < last_head; ++h) {
      const float* value = a.value_cache + (row + h) * a.value_row;
      for (int64_t q = h * group; q < (h + 1) * group; ++q) {
        add_scaled<kDim>(out + q * a.value_dim, value, scores[q * count + i], a.value_dim);
      }
    }
  });
}

template <int kDim>
void attend_all(const PagedAttention& a) {
  int64_t keys = 0;
  for (int64_t s = 0; s < a.singles; ++s) {
    const int64_t end = a.span(s)[2];
    keys += a.window > 0 ? std::min(end, a.window) : end;
  }
  const bool parallel = keys * a.heads * a.key_dim > kParallelSingles;
  // A task is a whole sequence where there are enough of them for the threads, else a single key head.
  const int64_t parts = parallel && a.singles < 4 ? a.kv_heads : 1;
  const int64_t heads = a.kv_heads / parts;
#pragma omp parallel for schedule(dynamic) if (parallel)
  for (int64_t i = 0; i < a.singles * parts; ++i) {
    static thread_local std::vector<float> buffer;
    const int64_t head = i % parts * heads;
    attend<kDim>(a, i / parts, head, head + heads, buffer);
  }
}

// The chunks of sequences [from, to), the last queries first: they see the most keys. A task has up to `queries` places and
// `sharers` of the query heads of a key head.
template <typename Workspace>
void attend_chunks(const PagedAttention& a, void (*run)(const chunks::Task&, Workspace&), int64_t from, int64_t to,
                   int64_t queries, int64_t sharers) {
  std::vector<chunks::Task> tasks;
  const int64_t group = a.heads / a.kv_heads, parts = (group + sharers - 1) / sharers;
  sharers = (group + parts - 1) / parts;
  int64_t work = 0;
  for (int64_t s = from; s < to; ++s) {
    const int64_t *span = a.span(s), start = span[1], end = span[2];
    const int32_t* table = a.table(s);
    work += (end - start) * end * a.heads * a.key_dim;
    for (int64_t blocks = (end - start + queries - 1) / queries; blocks-- > 0;) {
      const int64_t first = start + blocks * queries, last = std::min(end, first + queries);
      for (int64_t h = 0; h < a.kv_heads; ++h) {
        for (int64_t q = 0; q < group; q += sharers) {
          tasks.push_back({a, span[0], start, end, table, h, h * group + q, std::min(sharers, group - q), first, last});
        }
      }
    }
  }
#pragma omp parallel for schedule(dynamic) if (work > kParallelWork)
  for (size_t i = 0; i < tasks.size(); ++i) {
    static thread_local Workspace workspace;
    run(tasks[i], workspace);
  }
}

// Tasks have enough tiles for reading the keys to be a small part of their work.
void attend_chunks(const PagedAttention& a) {
  const int64_t group = a.heads / a.kv_heads;
#ifdef HAVE_AMX_TILES
  if (a.amx) {
    const int64_t queries = chunks::on_amx::kTile * std::max<int64_t>(1, 8 / group);
    return attend_chunks(a, chunks::on_amx::run, a.singles, a.sequences, queries, kSharers);
  }
#endif
  attend_chunks(a, chunks::run, a.singles, a.sequences, chunks::kTile * std::max<int64_t>(1, 4 / group), kSharers);
}

// The one-token sequences of a latent layer: the query heads of one lie side by side in the tiles of a chunk.
void attend_latent(const PagedAttention& a) {
  const bool divided = a.singles < omp_get_max_threads();
  attend_chunks(a, chunks::run, 0, a.singles, chunks::kTile, divided ? chunks::kLanes : chunks::kTile);
}

// Writes all tokens' keys and values into the cache.
void write_all(const PagedAttention& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const int64_t row = a.slots[t] * a.kv_heads + h;
      std::memcpy(a.key_cache + row * a.key_dim, a.key + t * a.key_token + h * a.key_head, a.key_dim * 4);
      if (a.latent()) continue;
      std::memcpy(a.value_cache + row * a.value_dim, a.value + t * a.value_token + h * a.value_head, a.value_dim * 4);
    }
  }
}

}  // namespace

extern "C" {

// Writes the batch's keys and values, then attends for all its tokens; the first `singles` sequences have one each.
void paged_attend(const PagedAttention* p) {
  write_all(*p);
  if (p->singles < p->sequences) attend_chunks(*p);
  if (!p->singles) return;
  if (p->latent()) return attend_latent(*p);
  const int64_t dim = p->key_dim == p->value_dim ? p->key_dim : 0;
  if (dim == 64) {
    attend_all<64>(*p);
  } else if (dim == 128) {
    attend_all<128>(*p);
  } else {
    attend_all<0>(*p);
  }
}

// A recorded layer's attention: what changes from step to step is step's, the rest is the layer's.
void paged_attend_step(const PagedAttention* layer, const PagedAttention* step) {
  PagedAttention call = *layer;
  call.slots = step->slots;
  call.tables = step->tables;
  call.spans = step->spans;
  call.singles = step->singles;
  call.sequences = step->sequences;
  call.table_width = step->table_width;
  paged_attend(&call);
}

}  // extern "C"
