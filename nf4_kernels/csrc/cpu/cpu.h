/* The C interface of libnf4_cpu.so. A function that returns int returns 0, or 1 for a bad argument. */
#pragma once

#include <stdint.h>

#include "gated_delta.h"
#include "mamba2.h"
#include "params.h"

#define NF4_EXPORT extern "C" __attribute__((visibility("default")))

/* out[n * k] in dtype: code * scale in float32, then rounded to nearest even where dtype is a 16-bit one. */
NF4_EXPORT int nf4_cpu_dequantize(const Nf4Weight* w, void* out, int32_t dtype, int32_t threads);

/* Of the rows from `row` on; out[rows * k]. */
NF4_EXPORT int nf4_cpu_dequantize_rows(const Nf4Weight* w, int64_t row, int64_t rows, void* out, int32_t dtype,
                                       int32_t threads);

NF4_EXPORT int nf4_cpu_linear(const Nf4Linear* p, int32_t threads);

/* GEMMs that share x, m, k and dtype, in one threaded region: x is prepared once. */
NF4_EXPORT int nf4_cpu_linear_group(const Nf4Linear* ps, int32_t count, int32_t threads);

/* One GEMM with what changes from call to call beside the weight: nothing that two callers share is written. */
NF4_EXPORT int nf4_cpu_linear_at(const Nf4Weight* w, const void* bias, const void* x, void* out, int64_t m,
                                 int32_t dtype, int32_t threads);

/* A GEMM for each choice of an expert, with that expert's [n, k] of a weight [count, n, k] (w has one expert's n, and its
 * scales from the first expert on). Experts begin with a block, and with a group of 256 blocks where scales are nested.
 * experts [tokens, top_k]: ids, others than 0 ... count - 1 give zeros. x [tokens, k], or [tokens, top_k, k] where
 * per_choice. bias [count, n] or null. out [tokens, top_k, n]; with an activation (params.h; 3: gpt-oss' clamped one)
 * [tokens, top_k, n / 2], of gates and ups; with routing [tokens, top_k] the sum over top_k, [tokens, n]. */
NF4_EXPORT int nf4_cpu_moe(const Nf4Weight* w, const void* bias, const void* x, const int32_t* experts,
                           const float* routing, void* out, int64_t count, int64_t tokens, int64_t top_k,
                           int32_t per_choice, int32_t dtype, int32_t activation, int32_t threads);

/* out[m, n] = x[m, k] w[n, k]^T + bias; w is stored as bfloat16, the rest float32. bias may be null. */
NF4_EXPORT int nf4_cpu_linear_bf16w(const float* x, const uint16_t* w, const float* bias, float* out, int64_t m,
                                    int64_t n, int64_t k, int32_t threads);

/* Advances the states of all sequences of a step by their tokens: nf4_kernels/gated_delta.py. Rows of no sequence are left. */
NF4_EXPORT int nf4_cpu_gated_delta(const Nf4GatedDelta* p, int32_t threads);

/* The same of Mamba2: nf4_kernels/mamba2.py. */
NF4_EXPORT int nf4_cpu_mamba2(const Nf4Mamba2* p, int32_t threads);

/* The instruction set in use: "portable", "avx2", "avx512", "avx512vnni" or "amx". */
NF4_EXPORT const char* nf4_cpu_isa(void);

/* Uses that instruction set from now on; nonzero, and no change, if this CPU cannot run it. */
NF4_EXPORT int nf4_cpu_set_isa(const char* name);

/* Whether OpenMP's threads of this process sleep at barriers soon (1), or first spin GOMP_SPINCOUNT times (0, the default):
 * where other work takes the cores, threads that spin keep those that they wait for from running. */
NF4_EXPORT void nf4_cpu_sleep_at_barriers(int32_t sleeps);

/* Seconds since the library was loaded. linear: wall time inside the linear calls. dequant: wall time of the
 * dequantize calls, plus what the first thread spent decoding weight panels inside linear calls. The kernels for few
 * rows decode in registers between multiplications; that share cannot be measured and is not in dequant. */
NF4_EXPORT void nf4_cpu_clock(double* dequant_seconds, double* linear_seconds);

/* Adds wall time of a linear layer that the caller has computed from dequantized rows to `linear`. */
NF4_EXPORT void nf4_cpu_count_linear(double seconds);

/* Bytes of a struct of params.h, gated_delta.h or mamba2.h; 0 for a name that is none of theirs. */
NF4_EXPORT int64_t nf4_cpu_struct_size(const char* name);
