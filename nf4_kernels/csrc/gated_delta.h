/* What the kernels of the gated delta rule are told; nf4_kernels/gated_delta.py says what the tensors are. It is plain C, so
 * that ctypes can mirror it: nf4_kernels/gated_delta_params.py. */
#pragma once

#include <stdint.h>

typedef struct {
  const void* qkv; /* qkv, z, a, b, conv_state and out are of dtype */
  const void* z;
  const void* a;
  const void* b;
  const void* conv_weight; /* float32, or of dtype */
  const float* a_log;
  const float* dt_bias;
  const void* norm_weight; /* float32, or of dtype */
  void* conv_state;
  void* state;
  void* out;
  const int32_t* slots;
  const int32_t* starts; /* query_start_loc; null where every sequence has one token */
  const uint8_t* has_state;
  uint32_t* counters; /* CUDA: sequences * key_heads of them, zeros before and after every launch */
  void* stream;
  int64_t qkv_stride; /* strides count elements: of rows, and of slots */
  int64_t z_stride;
  int64_t a_stride;
  int64_t b_stride;
  int64_t conv_slot;
  int64_t state_slot;
  int32_t sequences;
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t taps;
  int32_t dtype;
  int32_t conv_dtype;
  int32_t norm_dtype;
  int32_t state_dtype; /* float32 or bfloat16 */
  float eps;
} Nf4GatedDelta;
