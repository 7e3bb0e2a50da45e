/* What kernels of layers with states are told of a sequence's tokens, and of a causal convolution over them. */
#pragma once

#include <stdint.h>

namespace nf4 {

/* Some tokens of one sequence, which lie one after the other. */
struct SequenceRows {
  int64_t row; /* of the first token */
  int tokens;
  int64_t slot;
  bool continues; /* whether the slot holds a state */
};

/* x [T, C] with a weight [C, taps]; the state of a slot is [C, taps - 1]. */
struct Convolution {
  const void* x;
  int64_t stride;
  const void* weight;
  const float* bias; /* or null */
  void* state;
  int64_t slot_stride;
  int taps;
  int32_t dtype; /* of x and of the state */
  int32_t weight_dtype;
};

}  // namespace nf4
