// wgmma with A (64 weight rows x 16 k) in registers and B (tokens) in shared memory: a wrapper for each token count, which is
// the instruction's n.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace nf4 {

// d (64 x kTokens, in registers) = a b, or d + a b with accumulate. b describes a tile of kTokens rows of 128 swizzled bytes.
template <typename T, int kTokens>
__device__ __forceinline__ void wgmma(float (&d)[kTokens / 2], const unsigned (&a)[4], uint64_t b, bool accumulate);

// Four and eight sums of d as operands of the instruction.
#define NF4_SUMS_4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define NF4_SUMS_8(I) NF4_SUMS_4(I), NF4_SUMS_4(I + 4)

// The wrapper for T, which PTX calls TYPE. NAMES are the numbers of the operands d, A those of a; B and FLAG follow them.
#define NF4_WGMMA(T, TYPE, TOKENS, NAMES, A, B, FLAG, ...)                                                         \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma<T, TOKENS>(float (&d)[TOKENS / 2], const unsigned (&a)[4], uint64_t b,     \
                                                   bool accumulate) {                                              \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " FLAG ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B \
                 ", p, 1, 1, 0; }"                                                                                 \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));         \
  }

#define NF4_WGMMA_OF_BOTH_TYPES(TOKENS, A, B, FLAG)                                            \
  NF4_WGMMA(__half, "f16", TOKENS, NF4_NAMES_##TOKENS, A, B, FLAG, NF4_SUMS_OF_##TOKENS) \
  NF4_WGMMA(__nv_bfloat16, "bf16", TOKENS, NF4_NAMES_##TOKENS, A, B, FLAG, NF4_SUMS_OF_##TOKENS)

// Numbers of the operands that are a tile's sums, and these sums, each with those of the smaller tile in front of it.
#define NF4_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NF4_NAMES_32 NF4_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NF4_NAMES_48 NF4_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NF4_NAMES_64 NF4_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NF4_NAMES_80 NF4_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NF4_NAMES_96 NF4_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NF4_NAMES_112 NF4_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NF4_NAMES_128 NF4_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NF4_NAMES_136 NF4_NAMES_128 ", %64, %65, %66, %67"
#define NF4_NAMES_144 NF4_NAMES_136 ", %68, %69, %70, %71"
#define NF4_NAMES_152 NF4_NAMES_144 ", %72, %73, %74, %75"
#define NF4_NAMES_160 NF4_NAMES_152 ", %76, %77, %78, %79"
#define NF4_NAMES_176 NF4_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NF4_NAMES_192 NF4_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NF4_NAMES_200 NF4_NAMES_192 ", %96, %97, %98, %99"
#define NF4_NAMES_208 NF4_NAMES_200 ", %100, %101, %102, %103"
#define NF4_NAMES_216 NF4_NAMES_208 ", %104, %105, %106, %107"
#define NF4_NAMES_224 NF4_NAMES_216 ", %108, %109, %110, %111"
#define NF4_NAMES_232 NF4_NAMES_224 ", %112, %113, %114, %115"
#define NF4_NAMES_240 NF4_NAMES_232 ", %116, %117, %118, %119"
#define NF4_NAMES_256 NF4_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define NF4_SUMS_OF_16 NF4_SUMS_8(0)
#define NF4_SUMS_OF_32 NF4_SUMS_OF_16, NF4_SUMS_8(8)
#define NF4_SUMS_OF_48 NF4_SUMS_OF_32, NF4_SUMS_8(16)
#define NF4_SUMS_OF_64 NF4_SUMS_OF_48, NF4_SUMS_8(24)
#define NF4_SUMS_OF_80 NF4_SUMS_OF_64, NF4_SUMS_8(32)
#define NF4_SUMS_OF_96 NF4_SUMS_OF_80, NF4_SUMS_8(40)
#define NF4_SUMS_OF_112 NF4_SUMS_OF_96, NF4_SUMS_8(48)
#define NF4_SUMS_OF_128 NF4_SUMS_OF_112, NF4_SUMS_8(56)
#define NF4_SUMS_OF_136 NF4_SUMS_OF_128, NF4_SUMS_4(64)
#define NF4_SUMS_OF_144 NF4_SUMS_OF_136, NF4_SUMS_4(68)
#define NF4_SUMS_OF_152 NF4_SUMS_OF_144, NF4_SUMS_4(72)
#define NF4_SUMS_OF_160 NF4_SUMS_OF_152, NF4_SUMS_4(76)
#define NF4_SUMS_OF_176 NF4_SUMS_OF_160, NF4_SUMS_8(80)
#define NF4_SUMS_OF_192 NF4_SUMS_OF_176, NF4_SUMS_8(88)
#define NF4_SUMS_OF_200 NF4_SUMS_OF_192, NF4_SUMS_4(96)
#define NF4_SUMS_OF_208 NF4_SUMS_OF_200, NF4_SUMS_4(100)
#define NF4_SUMS_OF_216 NF4_SUMS_OF_208, NF4_SUMS_4(104)
#define NF4_SUMS_OF_224 NF4_SUMS_OF_216, NF4_SUMS_4(108)
#define NF4_SUMS_OF_232 NF4_SUMS_OF_224, NF4_SUMS_4(112)
#define NF4_SUMS_OF_240 NF4_SUMS_OF_232, NF4_SUMS_4(116)
#define NF4_SUMS_OF_256 NF4_SUMS_OF_240, NF4_SUMS_8(120)

NF4_WGMMA_OF_BOTH_TYPES(16, "%8, %9, %10, %11", "%12", "%13")
NF4_WGMMA_OF_BOTH_TYPES(32, "%16, %17, %18, %19", "%20", "%21")
NF4_WGMMA_OF_BOTH_TYPES(48, "%24, %25, %26, %27", "%28", "%29")
NF4_WGMMA_OF_BOTH_TYPES(64, "%32, %33, %34, %35", "%36", "%37")
NF4_WGMMA_OF_BOTH_TYPES(80, "%40, %41, %42, %43", "%44", "%45")
NF4_WGMMA_OF_BOTH_TYPES(96, "%48, %49, %50, %51", "%52", "%53")
NF4_WGMMA_OF_BOTH_TYPES(112, "%56, %57, %58, %59", "%60", "%61")
NF4_WGMMA_OF_BOTH_TYPES(128, "%64, %65, %66, %67", "%68", "%69")
NF4_WGMMA_OF_BOTH_TYPES(136, "%68, %69, %70, %71", "%72", "%73")
NF4_WGMMA_OF_BOTH_TYPES(144, "%72, %73, %74, %75", "%76", "%77")
NF4_WGMMA_OF_BOTH_TYPES(152, "%76, %77, %78, %79", "%80", "%81")
NF4_WGMMA_OF_BOTH_TYPES(160, "%80, %81, %82, %83", "%84", "%85")
NF4_WGMMA_OF_BOTH_TYPES(176, "%88, %89, %90, %91", "%92", "%93")
NF4_WGMMA_OF_BOTH_TYPES(192, "%96, %97, %98, %99", "%100", "%101")
NF4_WGMMA_OF_BOTH_TYPES(200, "%100, %101, %102, %103", "%104", "%105")
NF4_WGMMA_OF_BOTH_TYPES(208, "%104, %105, %106, %107", "%108", "%109")
NF4_WGMMA_OF_BOTH_TYPES(216, "%108, %109, %110, %111", "%112", "%113")
NF4_WGMMA_OF_BOTH_TYPES(224, "%112, %113, %114, %115", "%116", "%117")
NF4_WGMMA_OF_BOTH_TYPES(232, "%116, %117, %118, %119", "%120", "%121")
NF4_WGMMA_OF_BOTH_TYPES(240, "%120, %121, %122, %123", "%124", "%125")
NF4_WGMMA_OF_BOTH_TYPES(256, "%128, %129, %130, %131", "%132", "%133")

#undef NF4_SUMS_4
#undef NF4_SUMS_8
#undef NF4_WGMMA
#undef NF4_WGMMA_OF_BOTH_TYPES
#undef NF4_NAMES_16
#undef NF4_NAMES_32
#undef NF4_NAMES_48
#undef NF4_NAMES_64
#undef NF4_NAMES_80
#undef NF4_NAMES_96
#undef NF4_NAMES_112
#undef NF4_NAMES_128
#undef NF4_NAMES_136
#undef NF4_NAMES_144
#undef NF4_NAMES_152
#undef NF4_NAMES_160
#undef NF4_NAMES_176
#undef NF4_NAMES_192
#undef NF4_NAMES_200
#undef NF4_NAMES_208
#undef NF4_NAMES_216
#undef NF4_NAMES_224
#undef NF4_NAMES_232
#undef NF4_NAMES_240
#undef NF4_NAMES_256
#undef NF4_SUMS_OF_16
#undef NF4_SUMS_OF_32
#undef NF4_SUMS_OF_48
#undef NF4_SUMS_OF_64
#undef NF4_SUMS_OF_80
#undef NF4_SUMS_OF_96
#undef NF4_SUMS_OF_112
#undef NF4_SUMS_OF_128
#undef NF4_SUMS_OF_136
#undef NF4_SUMS_OF_144
#undef NF4_SUMS_OF_152
#undef NF4_SUMS_OF_160
#undef NF4_SUMS_OF_176
#undef NF4_SUMS_OF_192
#undef NF4_SUMS_OF_200
#undef NF4_SUMS_OF_208
#undef NF4_SUMS_OF_216
#undef NF4_SUMS_OF_224
#undef NF4_SUMS_OF_232
#undef NF4_SUMS_OF_240
#undef NF4_SUMS_OF_256

}  // namespace nf4
