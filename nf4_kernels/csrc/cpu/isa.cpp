/* Which instruction sets this CPU runs.
 *
 * CPUID is necessary but not sufficient: a hypervisor may report AVX-512 or AMX and still fault on it. So each is
 * also tried once, under a SIGILL handler, before its kernels are used. AMX needs the kernel's permission first. */
#include "isa.h"

#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

/* The undefined vectors inside GCC 12's own intrinsics set this off. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace nf4 {
namespace {

constexpr int kRequestPermission = 0x1023; /* ARCH_REQ_XCOMP_PERM */
constexpr int kTileData = 18;              /* XFEATURE_XTILEDATA */

volatile float sink;

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"))) void try_avx512() {
  __m512 a = _mm512_set1_ps(2.0f);
  __m512i bytes = _mm512_permutexvar_epi8(_mm512_set1_epi8(1), _mm512_castps_si512(a));
  a = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), a);
  sink = _mm512_reduce_add_ps(_mm512_mask_add_ps(a, 0x00ff, a, a));
}

__attribute__((target("avx512f,avx512vnni"))) void try_vnni() {
  __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_set1_epi16(1), _mm512_set1_epi16(2));
  sink = (float)_mm512_reduce_add_epi32(sum);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16"))) void try_amx() {
  alignas(64) uint8_t config[64] = {1};
  alignas(64) uint8_t data[1024] = {};
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;
    config[48 + t] = 16;
  }
  /* GCC's tile intrinsics do not name all the memory they read. */
  __asm__ volatile("" : : "r"(config), "r"(data) : "memory");
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_loadd(1, data, 64);
  _tile_loadd(2, data, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, data, 64);
  _tile_release();
  __m256bh halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(data));
  memcpy(data, &halves, sizeof halves);
  sink = data[0];
}

/* Process-wide, because sigaction is; only touched under `selection`. */
sigjmp_buf escape;

void on_illegal(int) { siglongjmp(escape, 1); }

bool survives(void (*attempt)()) {
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_illegal;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGILL, &action, &before)) return false;
  volatile bool ok = false;
  if (sigsetjmp(escape, 1) == 0) {
    attempt();
    ok = true;
  }
  sigaction(SIGILL, &before, nullptr);
  return ok;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  static const bool works = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vbmi") && survives(try_avx512);
  return works;
}

bool has_avx512vnni() {
  static const bool works = has_avx512() && __builtin_cpu_supports("avx512vnni") && survives(try_vnni);
  return works;
}

bool cpuid_amx() {
  uint32_t a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  bool tiles = (d >> 24 & 1) && (d >> 22 & 1);
  a = 7, c = 1;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return tiles && (a >> 5 & 1); /* AVX512_BF16, which splits the weights */
}

bool has_amx() {
  static const bool works = has_avx512() && cpuid_amx() &&
                            syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && survives(try_amx);
  return works;
}

struct Choice {
  const char* name;
  bool (*runs)();
  const Kernels* (*kernels)();
};

/* The first that runs is taken. */
const Choice kChoices[] = {
    {"amx", has_amx, amx_kernels},
    {"avx512vnni", has_avx512vnni, avx512vnni_kernels},
    {"avx2", has_avx2, avx2_kernels},
    {"portable", [] { return true; }, portable_kernels},
};

std::mutex selection;
std::atomic<const Kernels*> active{nullptr};

}  // namespace

bool select_kernels(const char* name) {
  std::lock_guard<std::mutex> hold(selection);
  for (const Choice& choice : kChoices) {
    if (strcmp(choice.name, name) != 0 || !choice.runs()) continue;
    active = choice.kernels();
    return true;
  }
  return false;
}

const Kernels* active_kernels() {
  if (const Kernels* chosen = active.load(std::memory_order_acquire)) return chosen;
  std::lock_guard<std::mutex> hold(selection);
  if (!active.load()) {
    for (const Choice& choice : kChoices) {
      if (!choice.runs()) continue;
      active = choice.kernels();
      break;
    }
  }
  return active;
}

}  // namespace nf4
