/* What every NF4 kernel is told: raw pointers, sizes, a dtype and a stream. Plain C, so that ctypes can mirror it.
 * nf4_kernels/params.py and cuda_library.py hold the same structs; change them together. */
#pragma once

#include <stdint.h>

enum { NF4_FLOAT32 = 0, NF4_FLOAT16 = 1, NF4_BFLOAT16 = 2 };

/* A row-major [n, k] weight in bitsandbytes' layout: two codes a byte, the high nibble first.
 * Nested where absmax_8bit is not null: scale i = absmax_code[absmax_8bit[i]] * absmax[i / 256]
 * + absmax_offset[i / 256 * offset_stride]. offset_stride is 0 (one offset) or 1 (one beside every absmax). */
typedef struct {
  const uint8_t* packed;
  const float* absmax;
  const uint8_t* absmax_8bit;
  const float* absmax_code;
  const float* absmax_offset;
  int64_t n;
  int64_t k;
  int32_t blocksize;
  int32_t offset_stride;
} Nf4Weight;

/* The weight that the launch after this one reads, as far as it is to be brought into L2 (sm_90 on; nothing where codes
 * is null). Its launch cuts the weight's groups of 8 rows into runs, the first longer_runs of them one group longer; of
 * each run the first code_bytes and scale_bytes are wanted, of absmax and offsets (nested scales) everything.
 * Every address is a multiple of 16. */
typedef struct {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* absmax;
  const uint8_t* offsets;
  int32_t runs;
  int32_t run_groups;
  int32_t longer_runs;
  int32_t group_code_bytes;
  int32_t group_scale_bytes;
  int32_t code_bytes;
  int32_t scale_bytes;
  int32_t absmax_bytes;
  int32_t offset_bytes;
} Nf4Next;

enum { NF4_NORM_K = 16384 };

enum { NF4_NO_ACTIVATION = 0, NF4_SILU = 1, NF4_GELU_TANH = 2 };

/* out[m, n] = x[m, k] weight^T + bias + residual; x, bias, residual and out are of dtype, dense and 16-byte aligned. bias
 * and residual [m, n] may be null. Where norm_weight [k] is not null, x's rows are normalised first: divided by the root of
 * (their squares' mean + norm_eps), times norm_weight (bfloat16 only; linear_wgmma: k up to NF4_NORM_K). Both on CUDA only.
 * With an activation out is activation(the first n / 2 columns) * the others, [m, n / 2] (linear_wgmma, bfloat16, n a multiple
 * of 16, no residual).
 * workspace: fp32 partial sums; counters: int32, all zero before and after every launch. */
typedef struct {
  Nf4Weight weight;
  const void* x;
  const void* bias;
  void* out;
  void* workspace;
  int32_t* counters;
  int64_t m;
  int32_t dtype;
  int32_t constant_weights; /* nothing under way on the stream writes the weight or norm_weight: both may be read at once */
  void* stream;
  uint64_t* clock; /* null, or NF4_CLOCK_WORDS words where the launch leaves its times */
  Nf4Next next;
  const void* residual;
  const void* norm_weight;
  float norm_eps;
  const void* tiles; /* linear_wgmma only: x arranged in its tiles (reference.py's arrange()) instead of x; else null */
  int32_t activation;
  int32_t out_tile; /* with an activation: 0, or out is arranged in tiles of so many rows, a power of two from 8 on; n a
                       multiple of 512 then */
} Nf4Linear;

/* Such times, in ns of the device's clock: when the launch began, when its last instruction ran, and of the launches that
 * take the times of their decoding how long one warp decoded, else 0; the fourth word is the launch's own.
 * By kind of launch (nf4_kernels/device_clock.py names the kinds); a launch of a kind counts completion ns more. The totals
 * of a kind are its launches' time, that of those whose decoding was timed, and their decoding. */
enum { NF4_CLOCK_KINDS = 4, NF4_CLOCK_WORDS = 4, NF4_CLOCK_TOTALS = 3 };
typedef struct {
  uint64_t* first[NF4_CLOCK_KINDS];
  int32_t count[NF4_CLOCK_KINDS];
  int32_t completion[NF4_CLOCK_KINDS];
} Nf4Clocks;

/* The shape of a linear_rows launch; nf4_kernels/plan.py chooses it. */
typedef struct {
  int32_t warps;       /* that multiply */
  int32_t blocks;      /* 64-wide k blocks of one of them */
  int32_t tiles;       /* of 8 tokens */
  int32_t stages;      /* of the shared-memory ring */
  int32_t cluster;     /* blocks that share rows, each with k parts of its own: 1 to 4; 1 before sm_90 */
  int32_t passes;      /* k parts of a block */
  int32_t part_blocks; /* 64-wide k blocks of a part; cluster * passes parts are k */
  int32_t chunk;       /* row groups that go through all passes together */
  int32_t grid;
} RowsPlan;

/* The shape of a linear_wgmma launch; nf4_kernels/plan.py chooses it. */
typedef struct {
  int32_t tokens; /* of a tile */
  int32_t groups; /* warpgroups that multiply, 64 weight rows each */
  int32_t grid;
  int32_t owner_steps; /* 0: all work is one line, cut evenly over the grid. Else the grid is a multiple of the tiles; every
                          tile is cut into as many parts, and its first has so many of its steps of 256 k */
} WgmmaPlan;
