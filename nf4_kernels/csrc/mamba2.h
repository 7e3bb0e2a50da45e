/* What the kernel of Mamba2 is told; nf4_kernels/mamba2.py says what the tensors are. It is plain C, so that ctypes can mirror
 * it: nf4_kernels/mamba2_params.py. */
#pragma once

#include <stdint.h>

typedef struct {
  const void* z; /* z, xbc, dt, conv_state and out are of dtype */
  const void* xbc;
  const void* dt;
  const float* conv_weight;
  const float* conv_bias; /* or null */
  const float* a_log;
  const float* d;
  const float* dt_bias;
  const float* norm_weight; /* null: no norm */
  void* conv_state;
  float* state;
  void* out;
  const int32_t* slots;
  const int32_t* starts; /* query_start_loc; null where every sequence has one token */
  const uint8_t* has_state;
  int64_t z_stride; /* strides count elements: of rows, and of slots */
  int64_t xbc_stride;
  int64_t dt_stride;
  int64_t conv_slot;
  int64_t state_slot;
  int32_t sequences;
  int32_t heads;
  int32_t head_dim;
  int32_t state_dim;
  int32_t groups;
  int32_t norm_groups;
  int32_t norm_before_gate;
  int32_t taps;
  int32_t dtype;
  float eps;
  float dt_min;
  float dt_max;
} Nf4Mamba2;
