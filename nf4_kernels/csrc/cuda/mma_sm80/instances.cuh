// The instances of linear_mma.cuh: NF4_INSTANCE(warps, token tiles of 8 tokens). nf4_kernels/plan/mma.py lists the same.
#pragma once

#define NF4_MMA_INSTANCES \
  NF4_INSTANCE(8, 1)      \
  NF4_INSTANCE(8, 2)      \
  NF4_INSTANCE(8, 3)      \
  NF4_INSTANCE(8, 4)      \
  NF4_INSTANCE(8, 6)      \
  NF4_INSTANCE(8, 8)
