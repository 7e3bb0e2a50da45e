/* What every NF4 kernel is told: raw pointers, sizes, a dtype and a stream. It is plain C, so that ctypes can mirror it.
 * nf4_kernels/params.py, cuda/library.py and cuda/device_clock.py hold the same structs and struct_sizes.h lists them: change
 * them together. */
#pragma once

#include <stdint.h>

enum { NF4_FLOAT32 = 0, NF4_FLOAT16 = 1, NF4_BFLOAT16 = 2 };
enum { NF4_TABLE_NF4 = 0, NF4_TABLE_FP4 = 1 };

/* A row-major [n, k] weight in bitsandbytes' layout: two codes a byte, the high nibble first.
 * Nested where absmax_8bit is not null: scale i = absmax_code[absmax_8bit[i]] * absmax[g]
 * + absmax_offset[g * offset_stride]. offset_stride is 0 (one offset) or 1 (one beside every absmax). The group g is
 * i / 256, but in a shard of a weight: (group_offset + i + i / (k / blocksize) * group_skip) / 256, so that it is the
 * whole weight's: group_offset blocks lie in front of the shard in its first group, group_skip between two of its rows. */
typedef struct {
  const uint8_t* packed;
  const float* absmax;
  const uint8_t* absmax_8bit;
  const float* absmax_code;
  const float* absmax_offset;
  int64_t n;
  int64_t k;
  int32_t blocksize;
#ifdef NF4_CPU
  int16_t offset_stride;
  int16_t table; /* what codes stand for; the CUDA kernels have NF4's values in their instructions */
#else
  int32_t offset_stride;
#endif
  int32_t group_offset;
  int32_t group_skip;
} Nf4Weight;

enum { NF4_NORM_K = 16384 };

enum { NF4_NO_ACTIVATION = 0, NF4_SILU = 1, NF4_GELU_TANH = 2 };

/* A GEMM: out[m, n] = x[m, k] weight^T + bias + residual; x, bias, residual and out are of dtype, dense and 16-byte aligned.
 * bias [n] and residual [m, n] may be null. Where norm_weight [k] is not null, each token of x is normalised first: it is
 * divided by the root of (its squares' mean + norm_eps) and multiplied by norm_weight (bfloat16 only; linear_wgmma: k up to
 * NF4_NORM_K). Residual and norm are there on CUDA only.
 * With an activation out is activation(the first n / 2 columns) * the others, [m, n / 2] (bfloat16, n a multiple of 16, no
 * residual).
 * workspace: tiled activations and float32 partial sums; counters: int32, all zero before and after every launch. */
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
  const void* residual;
  const void* norm_weight;
  float norm_eps;
  const void* tiles; /* linear_wgmma only: tiled activations (defined in nf4_kernels/reference.py) instead of x; else null */
  int32_t activation;
  int32_t out_tile; /* with an activation: 0, or out is tiled activations with this many tokens a tile, a multiple of
                       8; n is a multiple of 512 then */
} Nf4Linear;

/* The words of a launch hold, in ns of the device's clock, when it began and when its last instruction ran, and in launches
 * that time their decoding how long one warp decoded, else 0; the fourth word is the launch's own.
 * Nf4Clocks lists words by kind of launch (nf4_kernels/cuda/device_clock.py names the kinds); a launch of a kind counts
 * completion ns more. The totals of a kind are its launches' time, that of those whose decoding was timed, and their
 * decoding. */
enum { NF4_CLOCK_KINDS = 4, NF4_CLOCK_WORDS = 4, NF4_CLOCK_TOTALS = 3 };
typedef struct {
  uint64_t* first[NF4_CLOCK_KINDS];
  int32_t count[NF4_CLOCK_KINDS];
  int32_t completion[NF4_CLOCK_KINDS];
} Nf4Clocks;

/* The shape of a linear_rows launch; nf4_kernels/plan chooses it. */
typedef struct {
  int32_t warps;       /* consumer warps */
  int32_t blocks;      /* 64-wide k blocks of a consumer warp */
  int32_t stages;      /* of the shared-memory ring */
  int32_t cluster;     /* thread blocks that share rows (split-K), each with parts of k of its own: 1 to 4 */
  int32_t passes;      /* parts of k that a thread block does one after another */
  int32_t part_blocks; /* 64-wide k blocks of a part; cluster * passes parts are k */
  int32_t chunk;       /* row groups that go through all passes together */
  int32_t grid;        /* thread blocks */
} RowsPlan;

/* The shape of a linear_wgmma launch; nf4_kernels/plan chooses it. */
typedef struct {
  int32_t tokens;            /* of a token tile */
  int32_t groups;            /* consumer warpgroups, 64 weight rows each */
  int32_t grid;              /* thread blocks */
  int32_t first_split_steps; /* 0: stream-K. Else split-K: grid is a multiple of the tiles, the block that reduces a tile has
                                this many of its k steps (256 k), and the tile's other blocks share the others evenly */
} WgmmaPlan;

/* The shape of a linear_mma launch; nf4_kernels/plan chooses it. */
typedef struct {
  int32_t tokens;    /* of a token tile */
  int32_t warps;     /* that a thread block of the instance has at most; if tiles are split, it has all of them; in tiles of 80
                        tokens and more, which are wide: the m16 tiles of each of its 8 warps (4) */
  int32_t grid;      /* thread blocks; if tiles are split, all of them run at the same time */
  int32_t row_warps; /* 0: tiles are split or wide. Else thread blocks compute whole tiles: warps with rows of their own, */
  int32_t k_warps;   /* for each of these rows so many that share k, */
  int32_t loaders;   /* and 1, 2 or 4 that load activations */
} MmaPlan;

/* One-shot all-reduce: out = residual + the sum over the ranks of their x, all of count elements of dtype, 16-byte aligned,
 * a multiple of 16 bytes; at most NF4_ALL_REDUCE_LL_BYTES with two ranks, half of it with up to four, a quarter with eight.
 * ll128: in the LL128 protocol, of up to NF4_ALL_REDUCE_LL128_BYTES, between GPUs with NVLink and IPC buffers that have it.
 * residual may be null, out may be x. Every rank makes the same calls in the same order. buffers: this process's addresses of
 * all ranks' IPC buffers, its own among them. Where a rank does not come within the buffer's timeout, the launch traps
 * (fatal), or leaves anything in out and says which rank it was. */
enum {
  NF4_MAX_RANKS = 8,
  NF4_ALL_REDUCE_LL_BYTES = 2097152,
  NF4_ALL_REDUCE_LL128_BYTES = 7864320,
  NF4_IPC_HANDLE_BYTES = 64
};
typedef struct {
  const void* x;
  const void* residual;
  void* out;
  int64_t count;
  void* buffers[NF4_MAX_RANKS];
  int32_t dtype;
  int32_t rank;
  int32_t ranks;
  int32_t fatal;
  int32_t ll128;
  void* stream;
} Nf4AllReduce;

/* Attention of each sequence's newest token, whose key and value are written into the paged cache: [blocks, 2, 16, kv_heads,
 * 128], keys and values. query [T, kv_heads * group, 128], key and value [T, kv_heads, 128], of dtype as the cache (16 bit),
 * with strides in elements, multiples of 2; out [T, kv_heads * group, 128], or in tiles of tile_rows tokens where that is not
 * 0. items: item_count of 8 numbers each, of which numbers[counted] are to be computed, no more than 512 of a sequence;
 * tables [any, pitch]: KV blocks of a sequence (nf4_kernels/cuda/decode_attention.py says what they mean). sums [items, kv_heads
 * * group, 128], weights [items, kv_heads * group, 2] and arrived [items, kv_heads] are the kernel's own, arrived zeros
 * between launches. scale is that of scores, times log2(e). cosines and sines [T, 128] may be null, and query_norm and
 * key_norm [128], to whose elements offset is added. Thread blocks have `warps` warps, each of which has `stages` KV blocks
 * on their way, and a multiprocessor runs per_processor of them. */
typedef struct {
  void* cache;
  const void* query;
  const void* key;
  const void* value;
  void* out;
  const int32_t* numbers;
  const int32_t* items;
  const int32_t* tables;
  float* sums;
  float* weights;
  int32_t* arrived;
  const void* cosines;
  const void* sines;
  const void* query_norm;
  const void* key_norm;
  int64_t query_token;
  int64_t query_head;
  int64_t key_token;
  int64_t key_head;
  int64_t value_token;
  int64_t value_head;
  float scale;
  float eps;
  float offset;
  int32_t item_count;
  int32_t counted;
  int32_t pitch;
  int32_t kv_heads;
  int32_t group;
  int32_t tile_rows;
  int32_t dtype;
  int32_t warps;
  int32_t stages;
  int32_t per_processor;
  void* stream;
} Nf4DecodeAttention;

enum { NF4_SWIGLU_OAI = 3 };

/* GEMMs of a mixture of experts. weight holds num_experts weights of weight.n rows, one after another. Choice c of
 * tokens * top_k is token c / top_k's and names expert experts[c]; where that is none of num_experts its result is zeros.
 * x is [tokens, k], or where x_of_choices [tokens, top_k, k]; x, bias and out are of dtype (16 bit), dense and 16-byte aligned.
 * bias [num_experts, n] may be null. out is [tokens, top_k, n]; with an activation (the rows of an expert are gates, and then
 * as many ups) [tokens, top_k, n / 2]; with routing weights [tokens, top_k] it is [tokens, n], the sum over a token's choices
 * of routing * result. workspace: as many bytes as the plan says (nf4_kernels/plan/moe.py), 256-byte aligned.
 * follows_gated: a GEMM with an activation and the same experts is in front on the stream. Its launches let others start only
 * when the experts are there, so these and the weight are read while launches in front still run. */
typedef struct {
  Nf4Weight weight;
  const void* x;
  const int32_t* experts;
  const void* bias;
  const float* routing;
  void* out;
  void* workspace;
  int64_t tokens;
  int32_t top_k;
  int32_t num_experts;
  int32_t x_of_choices;
  int32_t dtype;
  int32_t activation;
  int32_t follows_gated;
  void* stream;
} Nf4Moe;

/* The shape of a moe_rows launch; nf4_kernels/plan/moe.py chooses it. */
typedef struct {
  int32_t warps;       /* consumer warps */
  int32_t teams;       /* of consumer warps, each with 16 rows of its own */
  int32_t blocks;      /* 64-wide k blocks of a consumer warp */
  int32_t tiles;       /* token tiles of 8 choices; so many are a group, whose expert's rows are read once */
  int32_t stages;      /* of the shared-memory ring */
  int32_t parts;       /* parts of k, whose partial sums are added by a launch behind, which then computes the activation */
  int32_t part_blocks; /* 64-wide k blocks of a part */
  int32_t grid;        /* thread blocks */
  int32_t held_groups; /* the most groups that a thread block's share of the work can touch */
  int32_t sorted;      /* a launch in front groups the choices; else every thread block does, for up to 1024 of them */
  int32_t adds;        /* there are no more choices than a group has, and they are added up in the same launch */
} MoeRowsPlan;

/* The shape of a moe_warps launch, for up to 1024 choices; nf4_kernels/plan/moe.py chooses it. */
typedef struct {
  int32_t warps;       /* of a thread block, each with units of its own */
  int32_t row_tiles;   /* of 16 weight rows, in a unit */
  int32_t grid;        /* thread blocks */
  int32_t held_groups; /* the most groups that a thread block's share of the work can touch; all of them where it adds */
  int32_t adds;        /* thread blocks have all groups, and add up a token's choices in the same launch */
} MoeWarpsPlan;

/* The shape of a moe_wgmma launch; nf4_kernels/plan/moe.py chooses it. */
typedef struct {
  int32_t tokens; /* choices of a token tile */
  int32_t groups; /* consumer warpgroups, 64 weight rows each */
  int32_t grid;   /* thread blocks */
  int32_t tiled;  /* a launch in front gathers the tiles' activations in memory; else each thread block gathers its own */
} MoeWgmmaPlan;
