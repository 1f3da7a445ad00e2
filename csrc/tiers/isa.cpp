// Tier detection: on x86 by cpuid, and by xgetbv for what the operating system saves on a context switch; on aarch64 by
// what Linux says of the processor.
#include "tiers/isa.h"

#include <stdexcept>

#if defined(KT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kt {
namespace {

struct CpuFeatures {
  bool avx2 = false, avx_vnni = false, avx512_vnni = false, avx512_bf16 = false, amx = false;
  bool neon_dotprod = false, neon_i8mm = false;
};

#if defined(KT_X86)

uint64_t enabled_state() {
  uint32_t lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<uint64_t>(hi) << 32) | lo;
}

// Linux grants the 8 KiB of tile registers to processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
// It refuses when an alternative signal stack is too small for them.
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

CpuFeatures detect() {
  CpuFeatures found;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !avx || !fma || !f16c) return found;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
  found.avx2 = ymm && (b & (1u << 5));
  found.avx512_vnni = found.avx2 && zmm && (b & f) && (b & dq) && (b & bw) && (b & vl) && (c & (1u << 11));
  const bool tiles = (state & 0x60000) == 0x60000;
  const bool has_tiles =
      (d & (1u << 22)) && (d & (1u << 24)) && (d & (1u << 25));  // bf16, tiles, int8: always together
  found.amx = found.avx512_vnni && tiles && has_tiles && may_use_tiles();
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avx_vnni = found.avx2 && (a & (1u << 4));
    found.avx512_bf16 = found.avx512_vnni && (a & (1u << 5));
  }
  return found;
}

#elif defined(__aarch64__) && defined(__linux__)

CpuFeatures detect() {
  CpuFeatures found;
  found.neon_dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  found.neon_i8mm = found.neon_dotprod && (getauxval(AT_HWCAP2) & HWCAP2_I8MM);
  return found;
}

#else

CpuFeatures detect() { return {}; }

#endif

// The table of a tier, or none where the build lacks it.
using Table = const KernelTable& (*)();
#if defined(KT_AVX2)
constexpr Table kAvx2 = avx2_tier::table;
#else
constexpr Table kAvx2 = nullptr;
#endif
#if defined(KT_AVX_VNNI)
constexpr Table kAvxVnni = avx_vnni_tier::table;
#else
constexpr Table kAvxVnni = nullptr;
#endif
#if defined(KT_AVX512_VNNI)
constexpr Table kAvx512Vnni = avx512_vnni_tier::table;
#else
constexpr Table kAvx512Vnni = nullptr;
#endif
#if defined(KT_AVX512_BF16)
constexpr Table kAvx512Bf16 = avx512_bf16_tier::table;
#else
constexpr Table kAvx512Bf16 = nullptr;
#endif
#if defined(KT_AMX)
constexpr Table kAmx = amx_tier::table;
#else
constexpr Table kAmx = nullptr;
#endif
#if defined(KT_NEON_DOTPROD)
constexpr Table kNeonDotprod = neon_dotprod_tier::table;
#else
constexpr Table kNeonDotprod = nullptr;
#endif
#if defined(KT_NEON_I8MM)
constexpr Table kNeonI8mm = neon_i8mm_tier::table;
#else
constexpr Table kNeonI8mm = nullptr;
#endif

struct Tiers {
  std::vector<const KernelTable*> available;
  std::vector<std::string> missing;

  void add(const char* name, bool can_run, Table table) {
    if (!can_run) return;
    if (table != nullptr)
      available.push_back(&table());
    else
      missing.push_back(name);
  }
};

Tiers find_tiers() {
  Tiers tiers;
  tiers.available.push_back(&scalar_tier::table());
  const CpuFeatures cpu = detect();
  tiers.add("avx2", cpu.avx2, kAvx2);
  tiers.add("avx_vnni", cpu.avx_vnni, kAvxVnni);
  tiers.add("avx512_vnni", cpu.avx512_vnni, kAvx512Vnni);
  tiers.add("avx512_bf16", cpu.avx512_bf16, kAvx512Bf16);
  tiers.add("amx", cpu.amx, kAmx);
  tiers.add("neon_dotprod", cpu.neon_dotprod, kNeonDotprod);
  tiers.add("neon_i8mm", cpu.neon_i8mm, kNeonI8mm);
  return tiers;
}

const Tiers& tiers() {
  static const Tiers found = find_tiers();
  return found;
}

}  // namespace

const std::vector<const KernelTable*>& available_tiers() { return tiers().available; }
const std::vector<std::string>& missing_tiers() { return tiers().missing; }

const KernelTable& tier_by_name(const std::string& name) {
  std::string known;
  for (const KernelTable* table : available_tiers()) {
    if (name == table->name) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
#if defined(KT_EMULATED)
  for (const KernelTable* table : {&avx512_bf16_emulated_tier::table(), &amx_emulated_tier::table()})
    if (name == table->name) return *table;
#if defined(KT_X86)
  if (detect().avx2 && name == avx_vnni_emulated_tier::table().name) return avx_vnni_emulated_tier::table();
#endif
#endif
  for (const std::string& missing : missing_tiers())
    if (name == missing)
      throw std::invalid_argument("instruction-set tier '" + name + "' is not in this build, which has: " + known);
  throw std::invalid_argument("instruction-set tier '" + name + "' cannot run on this machine; it has: " + known);
}

}  // namespace kt
