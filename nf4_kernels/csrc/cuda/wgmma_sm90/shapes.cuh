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

// Eight sums of d as operands of the instruction.
#define NF4_SUMS(I)                                                                                              \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])

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

#define NF4_WGMMA_OF_BOTH_TYPES(TOKENS, ...)         \
  NF4_WGMMA(__half, "f16", TOKENS, __VA_ARGS__) \
  NF4_WGMMA(__nv_bfloat16, "bf16", TOKENS, __VA_ARGS__)

// Numbers of operands: those of 8, 16, 32 tokens' sums, and so on, each with those in front of it.
#define NF4_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NF4_NAMES_32 NF4_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NF4_NAMES_64 NF4_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NF4_NAMES_96 NF4_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NF4_NAMES_128 NF4_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NF4_NAMES_160 NF4_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NF4_NAMES_192 NF4_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NF4_NAMES_224 NF4_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NF4_NAMES_256 NF4_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

NF4_WGMMA_OF_BOTH_TYPES(16, NF4_NAMES_16, "%8, %9, %10, %11", "%12", "%13", NF4_SUMS(0))
NF4_WGMMA_OF_BOTH_TYPES(32, NF4_NAMES_32, "%16, %17, %18, %19", "%20", "%21", NF4_SUMS(0), NF4_SUMS(8))
NF4_WGMMA_OF_BOTH_TYPES(64, NF4_NAMES_64, "%32, %33, %34, %35", "%36", "%37", NF4_SUMS(0), NF4_SUMS(8), NF4_SUMS(16),
                        NF4_SUMS(24))
NF4_WGMMA_OF_BOTH_TYPES(96, NF4_NAMES_96, "%48, %49, %50, %51", "%52", "%53", NF4_SUMS(0), NF4_SUMS(8), NF4_SUMS(16),
                        NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40))
NF4_WGMMA_OF_BOTH_TYPES(128, NF4_NAMES_128, "%64, %65, %66, %67", "%68", "%69", NF4_SUMS(0), NF4_SUMS(8), NF4_SUMS(16),
                        NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40), NF4_SUMS(48), NF4_SUMS(56))
NF4_WGMMA_OF_BOTH_TYPES(160, NF4_NAMES_160, "%80, %81, %82, %83", "%84", "%85", NF4_SUMS(0), NF4_SUMS(8), NF4_SUMS(16),
                        NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40), NF4_SUMS(48), NF4_SUMS(56), NF4_SUMS(64),
                        NF4_SUMS(72))
NF4_WGMMA_OF_BOTH_TYPES(192, NF4_NAMES_192, "%96, %97, %98, %99", "%100", "%101", NF4_SUMS(0), NF4_SUMS(8),
                        NF4_SUMS(16), NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40), NF4_SUMS(48), NF4_SUMS(56),
                        NF4_SUMS(64), NF4_SUMS(72), NF4_SUMS(80), NF4_SUMS(88))
NF4_WGMMA_OF_BOTH_TYPES(224, NF4_NAMES_224, "%112, %113, %114, %115", "%116", "%117", NF4_SUMS(0), NF4_SUMS(8),
                        NF4_SUMS(16), NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40), NF4_SUMS(48), NF4_SUMS(56),
                        NF4_SUMS(64), NF4_SUMS(72), NF4_SUMS(80), NF4_SUMS(88), NF4_SUMS(96), NF4_SUMS(104))
NF4_WGMMA_OF_BOTH_TYPES(256, NF4_NAMES_256, "%128, %129, %130, %131", "%132", "%133", NF4_SUMS(0), NF4_SUMS(8),
                        NF4_SUMS(16), NF4_SUMS(24), NF4_SUMS(32), NF4_SUMS(40), NF4_SUMS(48), NF4_SUMS(56),
                        NF4_SUMS(64), NF4_SUMS(72), NF4_SUMS(80), NF4_SUMS(88), NF4_SUMS(96), NF4_SUMS(104),
                        NF4_SUMS(112), NF4_SUMS(120))

#undef NF4_SUMS
#undef NF4_WGMMA
#undef NF4_WGMMA_OF_BOTH_TYPES
#undef NF4_NAMES_16
#undef NF4_NAMES_32
#undef NF4_NAMES_64
#undef NF4_NAMES_96
#undef NF4_NAMES_128
#undef NF4_NAMES_160
#undef NF4_NAMES_192
#undef NF4_NAMES_224
#undef NF4_NAMES_256

}  // namespace nf4
