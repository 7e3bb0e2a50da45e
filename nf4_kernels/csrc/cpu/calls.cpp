/* The call that Python makes: what changes from one to the next comes as plain arguments, so that callers share nothing. */
#include "cpu.h"

extern "C" int nf4_cpu_linear_at(const Nf4Weight* w, const void* bias, const void* x, void* out, int64_t m,
                                 int32_t dtype, int32_t threads) {
  if (!w) return 1;
  Nf4Linear p{};
  p.weight = *w;
  p.x = x;
  p.bias = bias;
  p.out = out;
  p.m = m;
  p.dtype = dtype;
  return nf4_cpu_linear_group(&p, 1, threads);
}
