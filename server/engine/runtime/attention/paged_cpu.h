// What paged_cpu.py hands over; it mirrors both structs.
#pragma once

#include <cstdint>

extern "C" {

struct PagedAttention {
  // [tokens, heads, dim] with the strides below (in floats); the last dimension is dense.
  const float* query;
  const float* key;
  const float* value;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  float* out;  // [tokens, heads, value_dim], dense
  // [num_blocks, block_size, kv_heads, dim], dense
  float* key_cache;
  float* value_cache;
  const int64_t* slots;   // [tokens]: where each token's key and value go
  const int64_t* tables;  // [sequences, table_width]: each sequence's blocks, the singles' first
  const int64_t* spans;   // [sequences, 3]: row of the batch, start and end of its tokens
  int64_t tokens, singles, sequences, table_width, block_size, heads, kv_heads, key_dim, value_dim;
  int64_t window;  // 0: none
  float scaling;
  float softcap;  // 0: none
};
}
