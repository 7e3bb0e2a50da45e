// Attention of a sequence's chunk on AMX: flash attention as in chunk_cpu.h, multiplied by tiles_amx.h. Keys and
// transposed values are left operands, queries and weights right ones, so that queries lie across the lanes of the
// results and the softmax of many needs no sums across lanes. Heads of any size: zeros fill the last tile.
#pragma once

#include "chunk_cpu.h"
#include "tiles_amx.h"

#ifdef HAVE_AMX_TILES
namespace chunks {
namespace on_amx {

using namespace amx;

constexpr int kTile = kWidth;  // queries of one head that are computed together
constexpr int kKeys = 128;     // of one step
constexpr float kLog2e = 1.44269504f;

// One thread's buffers, for tasks of `tiles` tiles.
class Workspace {
 public:
  void reserve(int64_t key_dim, int64_t value_dim, int64_t tiles) {
    const int64_t keys_wide = whole(key_dim, 32), values_wide = whole(value_dim, 32);
    const int64_t sizes[] = {tiles * kTile * keys_wide, kKeys * keys_wide, kKeys * values_wide, kKeys * kTile,
                             tiles * kTile * values_wide, kKeys * kTile, tiles * kTile, tiles * kTile};
    int64_t need = 0;
    for (int64_t size : sizes) need += size * 4;
    if (need > size_) {
      std::free(data_);
      data_ = static_cast<char*>(std::aligned_alloc(64, need));
      if (!data_) std::abort();
      size_ = need;
    }
    char** const operands[] = {&query, &keys, &values, &weights};
    float** const results[] = {&out, &scores, &peak, &total};
    char* next = data_;
    for (int i = 0; i < 8; ++i, next += sizes[i - 1] * 4) {
      if (i < 4) *operands[i] = next;
      else *results[i - 4] = reinterpret_cast<float*>(next);
    }
  }
  ~Workspace() { std::free(data_); }
  char *query;    // [tiles][key_dim / 32] steps of right operands
  char *keys;     // [kKeys / 32][key_dim / 32] steps of left operands
  char *values;   // [value_dim / 32][kKeys / 32] steps of left operands
  char *weights;  // [kKeys / 32] steps of right operands
  float *out, *scores, *peak, *total;  // transposed: queries across

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

inline void load_queries(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  const float factor = a.softcap > 0 ? a.scaling / a.softcap : a.scaling * kLog2e;
  char* to = w.query;
  for (int64_t q = 0; q < t.group(); ++q) {
    const float* head = a.query + (t.first_head + q) * a.query_head;
    for (int64_t first = t.first; first < t.last; first += kTile) {
      for (int64_t d = 0; d < a.key_dim; d += 32, to += kStep) {
        for (int half = 0; half < 2; ++half) {
          Parts rows[16];
          for (int i = 0; i < 16; ++i) {
            // Places behind the last query hold copies of it, whose results are not read.
            const int64_t place = std::min(first + half * 16 + i, t.last - 1);
            const float* from = head + (t.row + place - t.start) * a.query_token + d;
            const __m512 scale = _mm512_set1_ps(factor);
            rows[i] = split(_mm512_mul_ps(load(from, a.key_dim - d), scale),
                            _mm512_mul_ps(load(from + 16, a.key_dim - d - 16), scale));
          }
          store_transposed(rows, to + half * 2 * kTileBytes);
        }
      }
    }
  }
}

// 32 keys and their values, of places [begin, begin + 32), zeros from `end` on; block: which 32 of the step.
inline void load_keys(const Task& t, int64_t begin, int64_t end, int64_t block, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t key_steps = whole(a.key_dim, 32) / 32;
  const float *value[32];
  for (int64_t i = 0; i < 32; ++i) {
    const int64_t place = std::min(begin + i, end - 1);
    const int64_t slot = t.table[place / a.block_size] * a.block_size + place % a.block_size;
    const int64_t key_dim = begin + i < end ? a.key_dim : 0;
    const float* key = a.key_cache + (slot * a.kv_heads + t.head) * a.key_dim;
    value[i] = a.value_cache + (slot * a.kv_heads + t.head) * a.value_row;
    char* to = w.keys + block * key_steps * kStep + i / 16 * 2 * kTileBytes + i % 16 * 64;
    for (int64_t d = 0; d < key_steps * 32; d += 32, to += kStep) {
      const Parts row = split(load(key + d, key_dim - d), load(key + d + 16, key_dim - d - 16));
      _mm512_store_si512(to, row.high);
      _mm512_store_si512(to + kTileBytes, row.low);
    }
  }
  for (int64_t d = 0; d < whole(a.value_dim, 32); d += 16) {
    Parts rows[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t left = end - begin - 2 * i;
      rows[i] = split_pairs(load(value[2 * i] + d, left > 0 ? a.value_dim - d : 0),
                            load(value[2 * i + 1] + d, left > 1 ? a.value_dim - d : 0));
    }
    store_transposed(rows, w.values + (d / 32 * (kKeys / 32) + block) * kStep + d % 32 / 16 * 2 * kTileBytes);
  }
}

// 2^x for x <= 0, 2^-100 below that, to 2 units in the last place.
inline __m512 exp2_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
  const __m512 round = _mm512_set1_ps(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  const __m512 n = _mm512_sub_ps(_mm512_add_ps(x, round), round);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.327647129e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.675540961e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550713092e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402212024e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469440e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// factor * tanh(x), missing by a few units in the last place of the factor.
inline __m512 scaled_tanh(__m512 x, float factor) {
  const __m512 sign = _mm512_set1_ps(-0.0f), one = _mm512_set1_ps(1.0f);
  const __m512 e = exp2_negative(_mm512_mul_ps(_mm512_or_ps(x, sign), _mm512_set1_ps(2 * kLog2e)));
  const __m512 positive = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  return _mm512_mul_ps(_mm512_or_ps(positive, _mm512_and_ps(x, sign)), _mm512_set1_ps(factor));
}

// Queries at [place, place + 16) that see the key at `key`.
inline __mmask16 seeing(int64_t key, int64_t place, int64_t window) {
  const __mmask16 reached = window > 0 ? lanes(key - place + window) : 0xffff;
  return reached & ~lanes(key - place);
}

// A tile's place in the workspace.
struct Tile {
  int64_t place;  // of the first query in the sequence
  const char* query;
  float *out, *peak, *total;
};

// Scores (to base 2) of `keys` keys from place `begin` on become weights, as right operands; hidden ones become 0.
// scale: what the sums so far are worth now. kEdge: some keys are hidden from some queries.
template <bool kEdge>
inline void soften(const Task& t, const Tile& tile, int64_t begin, int64_t keys, Workspace& w, __m512 scale[2]) {
  __m512 before[2], top[2], sum[2];
  for (int v = 0; v < 2; ++v) before[v] = top[v] = _mm512_load_ps(tile.peak + v * 16);
  const __m512 hidden = _mm512_set1_ps(-INFINITY);
  for (int64_t i = 0; i < keys; ++i) {
    for (int v = 0; v < 2; ++v) {
      float* at = w.scores + i * kTile + v * 16;
      __m512 score = _mm512_load_ps(at);
      if (t.a.softcap > 0) score = scaled_tanh(score, t.a.softcap * kLog2e);
      if (kEdge) score = _mm512_mask_mov_ps(hidden, seeing(begin + i, tile.place + v * 16, t.a.window), score);
      if (kEdge || t.a.softcap > 0) _mm512_store_ps(at, score);
      top[v] = _mm512_max_ps(top[v], score);
    }
  }
  for (int v = 0; v < 2; ++v) {
    scale[v] = exp2_negative(_mm512_sub_ps(before[v], top[v]));
    sum[v] = _mm512_mul_ps(_mm512_load_ps(tile.total + v * 16), scale[v]);
    _mm512_store_ps(tile.peak + v * 16, top[v]);
  }
  for (int64_t i = 0; i < keys; i += 2) {
    for (int v = 0; v < 2; ++v) {
      __m512 each[2];
      for (int k = 0; k < 2; ++k) {
        const __m512 score = _mm512_load_ps(w.scores + (i + k) * kTile + v * 16);
        each[k] = exp2_negative(_mm512_sub_ps(score, top[v]));
        if (kEdge) each[k] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, hidden, _CMP_NEQ_OQ), each[k]);
      }
      sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(each[0], each[1]));
      const Parts pair = split_pairs(each[0], each[1]);
      char* to = w.weights + i / 32 * kStep + v * 2 * kTileBytes + i % 32 / 2 * 64;
      _mm512_store_si512(to, pair.high);
      _mm512_store_si512(to + kTileBytes, pair.low);
    }
  }
  for (int v = 0; v < 2; ++v) _mm512_store_ps(tile.total + v * 16, sum[v]);
}

// A tile's queries with `keys` keys from place `begin` on, which load_keys has made ready.
inline void attend(const Task& t, const Tile& tile, int64_t begin, int64_t keys, Workspace& w) {
  const int64_t key_steps = whole(t.a.key_dim, 32) / 32, value_steps = whole(t.a.value_dim, 32) / 32;
  for (int64_t i = 0; i < keys / 32; ++i) {
    multiply(w.keys + i * key_steps * kStep, tile.query, key_steps, w.scores + i * 32 * kTile, false);
  }
  const bool all_seen = begin + keys - 1 <= tile.place &&
                        (t.a.window <= 0 || begin > tile.place + kTile - 1 - t.a.window);
  __m512 scale[2];
  all_seen ? soften<false>(t, tile, begin, keys, w, scale) : soften<true>(t, tile, begin, keys, w, scale);
  const __m512 one = _mm512_set1_ps(1.0f);
  const bool same = (_mm512_cmp_ps_mask(scale[0], one, _CMP_EQ_OQ) & _mm512_cmp_ps_mask(scale[1], one, _CMP_EQ_OQ)) ==
                    0xffff;
  for (int64_t i = 0; !same && i < value_steps * 32; ++i) {
    for (int v = 0; v < 2; ++v) {
      float* at = tile.out + i * kTile + v * 16;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), scale[v]));
    }
  }
  stores_done();
  for (int64_t i = 0; i < value_steps; ++i) {
    multiply(w.values + i * (kKeys / 32) * kStep, w.weights, keys / 32, tile.out + i * 32 * kTile, true);
  }
}

inline void store(const Task& t, const Tile& tile, int64_t query_head) {
  const PagedAttention& a = t.a;
  for (int half = 0; half < 2; ++half) {
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(tile.total + half * 16));
    const int64_t row = t.row + tile.place + half * 16 - t.start;
    const int64_t queries = std::min<int64_t>(16, t.last - tile.place - half * 16);
    for (int64_t d = 0; d < a.value_dim; d += 16) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) {
        const __m512 sums = _mm512_load_ps(tile.out + (d + i) * kTile + half * 16);
        rows[i] = _mm512_castps_si512(_mm512_mul_ps(sums, share));
      }
      transpose(rows);
      for (int i = 0; i < queries; ++i) {
        float* to = a.out + ((row + i) * a.heads + query_head) * a.value_dim + d;
        _mm512_mask_storeu_ps(to, lanes(a.value_dim - d), _mm512_castsi512_ps(rows[i]));
      }
    }
  }
}

inline void run(const Task& t, Workspace& w) {
  const PagedAttention& a = t.a;
  const int64_t columns = whole(t.last - t.first, kTile) / kTile, tiles = t.group() * columns;
  const int64_t key_wide = whole(a.key_dim, 32), value_wide = whole(a.value_dim, 32);
  w.reserve(a.key_dim, a.value_dim, tiles);
  load_queries(t, w);
  std::fill(w.out, w.out + tiles * value_wide * kTile, 0.0f);
  for (int64_t i = 0; i < tiles; ++i) {
    // As in chunk_cpu.h; scores are to base 2 here.
    const float* sink = a.sinks ? a.sinks + t.first_head + i / columns : nullptr;
    std::fill_n(w.total + i * kTile, kTile, sink ? 1.0f : 0.0f);
    std::fill_n(w.peak + i * kTile, kTile, sink ? *sink * kLog2e : -1e30f);
  }
  const Tiles loaded;
  const auto tile_at = [&](int64_t i) -> Tile {
    return {t.first + i % columns * kTile, w.query + i * key_wide / 32 * kStep, w.out + i * value_wide * kTile,
            w.peak + i * kTile, w.total + i * kTile};
  };
  const int64_t from = a.window > 0 ? std::max<int64_t>(0, t.first - a.window + 1) / kKeys * kKeys : 0;
  for (int64_t begin = from; begin < t.last; begin += kKeys) {
    for (int64_t i = 0; i < kKeys && begin + i < t.last; i += 32) load_keys(t, begin + i, t.last, i / 32, w);
    stores_done();
    for (int64_t i = 0; i < tiles; ++i) {
      const Tile tile = tile_at(i);
      const int64_t keys = whole(std::min<int64_t>(kKeys, std::min(tile.place + kTile, t.last) - begin), 32);
      if (keys <= 0 || (a.window > 0 && begin + kKeys <= tile.place - a.window + 1)) continue;
      attend(t, tile, begin, keys, w);
    }
  }
  for (int64_t i = 0; i < tiles; ++i) store(t, tile_at(i), t.first_head + i / columns);
}

}  // namespace on_amx
}  // namespace chunks
#endif
