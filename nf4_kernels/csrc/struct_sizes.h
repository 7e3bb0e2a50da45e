/* The sizes of the structs that Python mirrors with ctypes, by name: Python compares them when it loads a library. */
#pragma once

#include <stddef.h>
#include <string.h>

#include "gated_delta.h"
#include "params.h"

namespace nf4 {

/* Bytes of a struct of params.h or gated_delta.h; 0 for a name that is none of theirs. */
inline int64_t struct_size(const char* name) {
  static const struct {
    const char* name;
    size_t bytes;
  } sizes[] = {
      {"Nf4Weight", sizeof(Nf4Weight)}, {"Nf4Linear", sizeof(Nf4Linear)},
      {"Nf4Clocks", sizeof(Nf4Clocks)}, {"RowsPlan", sizeof(RowsPlan)}, {"WgmmaPlan", sizeof(WgmmaPlan)},
      {"MmaPlan", sizeof(MmaPlan)},
      {"Nf4AllReduce", sizeof(Nf4AllReduce)}, {"Nf4DecodeAttention", sizeof(Nf4DecodeAttention)},
      {"Nf4Moe", sizeof(Nf4Moe)},       {"MoeRowsPlan", sizeof(MoeRowsPlan)}, {"MoeWgmmaPlan", sizeof(MoeWgmmaPlan)},
      {"MoeWarpsPlan", sizeof(MoeWarpsPlan)}, {"Nf4GatedDelta", sizeof(Nf4GatedDelta)},
  };
  for (const auto& known : sizes) {
    if (name && strcmp(known.name, name) == 0) return (int64_t)known.bytes;
  }
  return 0;
}

}  // namespace nf4
