// Attention of a sequence's chunk over the paged cache, float32: flash attention whose matrix tiles are kept in
// vector registers. Queries lie across the vectors' lanes, so that the softmax of many needs no sums across lanes, and
// keys and values are read as they are stored. The vectors are GCC's, as wide as the machine's registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "paged_cpu.h"

namespace chunks {

// Results of kRows x kVectors and their operands fill the registers.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 8;
#else
constexpr int kBytes = 32, kRows = 4;
#endif
constexpr int kVectors = 3;
constexpr int kLanes = kBytes / 4;
constexpr int kTile = kVectors * kLanes;  // queries that are computed together, of one head or of several
constexpr int kKeys = 64;                 // of one step: they and their values stay in L1

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));

inline Vec all(float value) { return Vec{} + value; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x <= 0, e^-87 below that.
inline Vec exp_negative(Vec x) { return exp_in_range<Vec, Ints>(larger(x, all(-87.0f))); }

// c[kRows][kTile] = scale * c + a b, where a[i][d] is a[i * a_row + d * a_depth] and b is [depth][kTile]; scale null: 0. Of c
// and b only the first kUsed vectors of a row.
template <int kUsed>
inline void multiply_add(const float* a, int64_t a_row, int64_t a_depth, const Vec* b, Vec* c, const Vec* scale,
                    int64_t depth) {
  Vec sums[kRows][kUsed];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < kUsed; ++v) sums[i][v] = scale ? c[i * kVectors + v] * scale[v] : Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    const Vec* right = b + d * kVectors;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec left = all(a[i * a_row + d * a_depth]);
#pragma GCC unroll 3
      for (int v = 0; v < kUsed; ++v) sums[i][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < kUsed; ++v) c[i * kVectors + v] = sums[i][v];
  }
}

inline int64_t whole(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// One thread's buffers, for tasks of `tiles` tiles.
class Workspace {
 public:
  void reserve(int64_t key_dim, int64_t value_dim, int64_t tiles) {
    const int64_t rows = whole(value_dim, kRows);
    const int64_t sizes[] = {tiles * key_dim * kTile, tiles * rows * kTile, tiles * kTile, tiles * kTile,
                             kKeys * kTile,           kKeys * whole(key_dim, kLanes), kKeys * whole(rows, kLanes)};
    float** const parts[] = {&query, &out, &peak, &total, &scores, &keys, &values};
    int64_t need = 0;
    for (int64_t size : sizes) need += size;
    if (need > size_) {
      std::free(data_);
      data_ = static_cast<float*>(std::aligned_alloc(64, whole(need * 4, 64)));
      if (!data_) std::abort();
      size_ = need;
    }
    float* next = data_;
    for (int i = 0; i < 7; ++i, next += sizes[i - 1]) *parts[i] = next;
  }
  ~Workspace() { std::free(data_); }
  float *query, *out, *peak, *total, *scores;  // transposed: queries across
  float *keys, *values;                        // [kKeys][dim]; values' rows padded for whole tiles

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// A block of queries of one sequence: query heads of one key head. A tile has queries of one head, or all queries of as
// many heads as fit into it: results of a query do not depend on which others are beside it.
struct Task {
  const PagedAttention& a;
  int64_t row, start, end;  // rows [row, ...) of the batch are the sequence's tokens [start, end)
  const int32_t* table;
  int64_t head;             // of the keys
  int64_t first_head;       // of the queries
  int64_t sharers;          // query heads
  int64_t first, last;      // of the queries, as places in the sequence
  int64_t group() const { return sharers; }
  int64_t count() const { return last - first; }
  int64_t columns() const { return whole(count(), kTile) / kTile; }  // tiles of a head
  int64_t heads() const { return std::max<int64_t>(1, std::min(group(), kTile / count())); }  // of a tile
  int64_t tiles() const { return whole(group(), heads()) / heads() * columns(); }
  int64_t first_place(int64_t tile) const { return first + tile % columns() * kTile; }
  // The queries of a tile.
  int64_t lanes(int64_t tile) const {
    const int64_t own = std::min(heads(), group() - tile / columns() * heads());
    return own * std::min<int64_t>(kTile, last - first_place(tile));
  }
};

// A query: its head among those of the key head, and its place in the sequence.
struct Lane {
  int64_t head, place;
  static Lane of(const Task& t, int64_t tile, int64_t i) {
    if (t.columns() > 1) return {tile / t.columns(), t.first_place(tile) + i};
    return {tile * t.heads() + i / t.count(), t.first + i % t.count()};
  }
};

inline void load_queries(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  for (int64_t tile = 0; tile < t.tiles(); ++tile) {
    float* to = w.query + tile * a.key_dim * kTile;
    const int64_t lanes = t.lanes(tile);
    for (int64_t i = 0; i < kTile; ++i) {
      // Lanes behind the last query hold copies of it, whose results are not read.
      const Lane own = Lane::of(t, tile, std::min(i, lanes - 1));
      const float* from =
          a.query + (t.row + own.place - t.start) * a.query_token + (t.first_head + own.head) * a.query_head;
      for (int64_t d = 0; d < a.key_dim; ++d) to[d * kTile + i] = from[d] * a.scaling;
    }
  }
}

// Keys and values of places [begin, begin + kKeys), zeros from `end` on.
inline void load_keys(const Task& t, int64_t begin, int64_t end, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t padded = whole(a.value_dim, kRows);
  for (int64_t i = 0; i < kKeys; ++i) {
    float *key = w.keys + i * a.key_dim, *value = w.values + i * padded;
    const int64_t place = begin + i;
    if (place >= end) {
      std::memset(key, 0, a.key_dim * 4);
      std::memset(value, 0, padded * 4);
      continue;
    }
    const int64_t slot = t.table[place / a.block_size] * a.block_size + place % a.block_size;
    std::memcpy(key, a.key_cache + (slot * a.kv_heads + t.head) * a.key_dim, a.key_dim * 4);
    if (a.latent()) continue;
    std::memcpy(value, a.value_cache + (slot * a.kv_heads + t.head) * a.value_row, a.value_dim * 4);
    for (int64_t d = a.value_dim; d < padded; ++d) value[d] = 0;
  }
}

// The scores of `keys` keys from place `begin` on become their exponentials; hidden ones become 0. scale: what the sums
// so far are worth now.
template <int kUsed>
inline void soften(const Task& t, int64_t begin, int64_t keys, int64_t tile, Vec* scores, Vec* peak, Vec* total,
                   Vec* scale) {
  const float cap = t.a.softcap;
  if (cap > 0) {
    float* each = reinterpret_cast<float*>(scores);
    for (int64_t i = 0; i < keys; ++i, each += kTile) {
      for (int lane = 0; lane < kUsed * kLanes; ++lane) each[lane] = cap * std::tanh(each[lane] / cap);
    }
  }
  const int64_t window = t.a.window > 0 ? t.a.window : INT64_MAX / 2;
  const int64_t place = t.first_place(tile);
  const bool all_seen = begin + keys - 1 <= place && begin > place + kTile - 1 - window;
  for (int v = 0; v < kUsed; ++v) {
    if (!all_seen) {
      // The last key that a lane's query sees, as one of these keys; with a window it sees `reach` of them.
      Ints last;
      for (int i = 0; i < kLanes; ++i) last[i] = v * kLanes + i;
      if (t.heads() > 1) last %= static_cast<int32_t>(t.count());
      last += static_cast<int32_t>(std::min<int64_t>(place - begin, 1 << 29));
      const int32_t reach = static_cast<int32_t>(std::min<int64_t>(window, 1 << 29));
      for (int32_t i = 0; i < keys; ++i) {
        Vec& score = scores[i * kVectors + v];
        score = (last >= i) & (last - reach < i) ? score : all(-INFINITY);
      }
    }
    Vec top = peak[v];
    for (int64_t i = 0; i < keys; ++i) top = larger(top, scores[i * kVectors + v]);
    scale[v] = exp_negative(peak[v] - top);
    peak[v] = top;
    Vec sum = total[v] * scale[v];
    for (int64_t i = 0; i < keys; ++i) {
      Vec& score = scores[i * kVectors + v];
      const Vec value = exp_negative(score - top);
      score = all_seen ? value : (score == all(-INFINITY) ? Vec{} : value);
      sum += score;
    }
    total[v] = sum;
  }
}

inline void store(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t padded = whole(a.value_dim, kRows);
  for (int64_t tile = 0; tile < t.tiles(); ++tile) {
    for (int64_t i = 0; i < t.lanes(tile); ++i) {
      const Lane own = Lane::of(t, tile, i);
      const int64_t row = t.row + own.place - t.start;
      float* to = a.out + (row * a.heads + t.first_head + own.head) * a.value_dim;
      const float* from = w.out + tile * padded * kTile + i;
      const float share = 1.0f / w.total[tile * kTile + i];
      for (int64_t d = 0; d < a.value_dim; ++d) to[d] = from[d * kTile] * share;
    }
  }
}

template <int kUsed>
inline void run_tiles(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t tiles = t.tiles(), padded = whole(a.value_dim, kRows);
  const float* values = a.latent() ? w.keys : w.values;
  const int64_t value_row = a.latent() ? a.key_dim : padded;
  const int64_t from = a.window > 0 ? std::max<int64_t>(0, t.first - a.window + 1) / kKeys * kKeys : 0;
  for (int64_t begin = from; begin < t.last; begin += kKeys) {
    load_keys(t, begin, t.last, w);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t place = t.first_place(tile);
      const int64_t keys = whole(std::min<int64_t>(kKeys, std::min(place + kTile, t.last) - begin), kRows);
      if (keys <= 0 || (a.window > 0 && begin + kKeys <= place - a.window + 1)) continue;
      const Vec* query = reinterpret_cast<Vec*>(w.query + tile * a.key_dim * kTile);
      Vec* scores = reinterpret_cast<Vec*>(w.scores);
      Vec* out = reinterpret_cast<Vec*>(w.out + tile * padded * kTile);
      for (int64_t i = 0; i < keys; i += kRows) {
        multiply_add<kUsed>(w.keys + i * a.key_dim, a.key_dim, 1, query, scores + i * kVectors, nullptr, a.key_dim);
      }
      Vec scale[kVectors];
      soften<kUsed>(t, begin, keys, tile, scores, reinterpret_cast<Vec*>(w.peak) + tile * kVectors,
                    reinterpret_cast<Vec*>(w.total) + tile * kVectors, scale);
      for (int64_t d = 0; d < padded; d += kRows) {
        multiply_add<kUsed>(values + d, 1, value_row, scores, out + d * kVectors, scale, keys);
      }
    }
  }
}

inline void run(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t tiles = t.tiles(), padded = whole(a.value_dim, kRows);
  w.reserve(a.key_dim, a.value_dim, tiles);
  load_queries(t, w);
  std::fill(w.out, w.out + tiles * padded * kTile, 0.0f);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t i = 0; i < kTile; ++i) {
      // A sink is a key that every query has seen. Without one it is finite, so that a query with no key stays a number.
      const int64_t head = std::min(Lane::of(t, tile, i).head, t.group() - 1);
      w.total[tile * kTile + i] = a.sinks ? 1.0f : 0.0f;
      w.peak[tile * kTile + i] = a.sinks ? a.sinks[t.first_head + head] : -1e30f;
    }
  }
  // The first tile has the most queries.
  const int64_t lanes = t.lanes(0);
  static_assert(kVectors == 3, "one form for each number of vectors");
  if (lanes <= kLanes) {
    run_tiles<1>(t, w);
  } else if (lanes <= 2 * kLanes) {
    run_tiles<2>(t, w);
  } else {
    run_tiles<3>(t, w);
  }
  store(t, w);
}

}  // namespace chunks
