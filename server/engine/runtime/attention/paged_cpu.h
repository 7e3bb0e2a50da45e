// What paged_cpu.py hands over (it mirrors both structs), and the exponential of both kernels.
#pragma once

#include <cstdint>
#include <cstring>

extern "C" {

struct PagedAttention {
  // [tokens, heads, dim] with the strides below (in floats); the last dimension is dense.
  const float* query;
  const float* key;
  const float* value;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  float* out;  // [tokens, heads, value_dim], dense
  // [num_blocks, block_size, kv_heads, dim], dense; one and the same if values are the first columns of keys
  float* key_cache;
  float* value_cache;
  const int64_t* slots;   // [tokens]: where each token's key and value go
  const int32_t* tables;  // [rows, table_width]: the block tables
  const int64_t* spans;   // [sequences, 4], the singles' first: row of the batch, start and end of its tokens, row of tables
  int64_t tokens, singles, sequences, table_width, block_size, heads, kv_heads, key_dim, value_dim;
  int64_t value_row;  // floats from one value in the cache to the next: key_dim where values are the first columns of keys
  int64_t window;  // 0: none
  const float* sinks;  // [heads]: the score of one more key, whose value is zero; null: none
  float scaling;
  float softcap;  // 0: none
  int32_t amx;    // whether this machine runs AMX

  bool latent() const { return value_cache == key_cache; }
  const int64_t* span(int64_t sequence) const { return spans + sequence * 4; }
  const int32_t* table(int64_t sequence) const { return tables + span(sequence)[3] * table_width; }
};
}

// e^x for -87 <= x <= 0, to 2 units in the last place. Float is float or a vector of them, Ints its bits' type.
template <typename Float, typename Ints>
inline Float exp_in_range(Float x) {
  const Float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Float n = shifted - 12582912.0f;
  const Float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Float p = Float{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - (0x4B400000 - 127)) << 23;
  Float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
