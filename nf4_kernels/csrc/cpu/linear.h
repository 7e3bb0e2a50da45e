/* What the drivers of the GEMMs share: argument checks, the prepared x and the cutting of work into tasks. */
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace nf4 {

/* How a GEMM runs: decoded in registers, through float32 panels in L1, or through panels in bfloat16 or fixed point. */
enum class Path { kFused, kPanel, kTiles };

bool valid_weight(const Nf4Weight* w);

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/* Scratch memory of the calling thread: `shared` is what it prepares for all threads of a GEMM. */
struct ThreadScratch {
  Scratch x, order;
  Scratch panel, small, outputs;
  static ThreadScratch& mine();
};

/* x in float32 with a padded row stride. Uses x itself where it already is. */
class XInput {
 public:
  XInput(const void* x, int32_t dtype, int64_t m, int64_t k, Scratch& scratch);
  /* This thread's part of the conversion. */
  void convert(int id, int threads) const;
  bool copies() const { return copy_ != nullptr; }
  Prepared prepared;

 private:
  const void* from_;
  int32_t dtype_;
  float* copy_ = nullptr;
};

/* Work is cut into tasks of kUnit rows of a weight by a range of x's rows. Each range decodes the weights again, so
 * there is one, unless units are fewer than threads or x is more than a core's L2 should hold: every unit reads all of
 * its range. Tasks of one range follow each other. */
struct Tasks {
  int64_t units, ranges, rows_per_range, m;
  Tasks(int64_t units, int64_t m, int64_t threads, int64_t row_bytes);
  int64_t count() const { return units * ranges; }
  int64_t unit(int64_t task) const { return task % units; }
  int64_t m_begin(int64_t task) const { return task / units * rows_per_range; }
  int64_t m_end(int64_t task) const {
    int64_t end = m_begin(task) + rows_per_range;
    return end < m ? end : m;
  }
};

/* How GEMMs that share x run. */
Path choose_path(const Kernels* kernels, const Nf4Linear* ps, int count);

/* Part `id` of `threads` of x in the order of the path's kernel. */
void order_x(const Kernels* kernels, Path path, const Prepared& x, void* order, bool split, int id, int threads);

/* One unit of weight rows of one GEMM, for tokens [m_begin, m_end) of x. */
struct Unit {
  const Nf4Linear* p;
  int64_t row0;
  int rows;
  int64_t m_begin, m_end;
  bool timed; /* the first thread adds its decoding time to the clock */
};

/* Computes a unit; split: see Kernels::tiles_decode. On tiles between tiles_begin() and tiles_end(). */
void run_unit(const Kernels* kernels, Path path, const Prepared& x, const Unit& u, bool split, ThreadScratch& scratch);

/* A GEMM of float32 with a weight of another kind than NF4, a W. */
template <class W>
struct GemmWith {
  const Kernels* kernels;
  const W* w;
  const float* bias;
  float* out;
  int64_t n;
  const Prepared* x;
};

/* Bytes of x as the tile kernels want it: 16 rows a tile column, two parts where split, or one and a scale for 64 columns. */
inline size_t tile_order_bytes(int64_t m, int64_t k, bool split) {
  return (size_t)(round_up(m, 16) * (round_up(k, 32) * (split ? 4 : 2) + k / 64 * 4));
}

}  // namespace nf4
