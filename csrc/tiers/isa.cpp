// Tier detection by cpuid, and by xgetbv for what the operating system saves on a context switch.
#include "tiers/isa.h"

#include <stdexcept>

#include "runtime/grouped.h"
#include "tiers/grouped.h"

#if defined(KT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kt {
namespace {

struct CpuFeatures { bool avx2 = false, avx512_vnni = false, avx512_bf16 = false, amx = false; };

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
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = found.avx512_vnni && (a & (1u << 5));
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
  tiers.add("avx512_vnni", cpu.avx512_vnni, kAvx512Vnni);
  tiers.add("avx512_bf16", cpu.avx512_bf16, kAvx512Bf16);
  tiers.add("amx", cpu.amx, kAmx);
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
#endif
  for (const std::string& missing : missing_tiers())
    if (name == missing)
      throw std::invalid_argument("instruction-set tier '" + name + "' is not in this build, which has: " + known);
  throw std::invalid_argument("instruction-set tier '" + name + "' cannot run on this machine; it has: " + known);
}

const std::vector<QTypeInfo>& qtype_infos() {
  static const std::vector<QTypeInfo> infos = {
      {QType::F32, "F32", 1, 4, ActForm::Float},           {QType::F16, "F16", 1, 2, ActForm::Float},
      {QType::BF16, "BF16", 1, 2, ActForm::Float},         {QType::Q4_0, "Q4_0", 32, 18, ActForm::Q32},
      {QType::Q8_0, "Q8_0", 32, 34, ActForm::Q32},         {QType::Q4_K, "Q4_K", 256, 144, ActForm::Q256},
      {QType::Q5_K, "Q5_K", 256, 176, ActForm::Q256},      {QType::Q6_K, "Q6_K", 256, 210, ActForm::Q256},
      {QType::IQ4_XS, "IQ4_XS", 256, 136, ActForm::Q256},  {QType::MXFP4, "MXFP4", 32, 17, ActForm::Q32},
      {QType::IQ2_XXS, "IQ2_XXS", 256, 66, ActForm::Q256}, {QType::IQ2_XS, "IQ2_XS", 256, 74, ActForm::Q256},
      {QType::IQ2_S, "IQ2_S", 256, 82, ActForm::Q256},     {QType::IQ3_XXS, "IQ3_XXS", 256, 98, ActForm::Q256},
      {QType::IQ3_S, "IQ3_S", 256, 110, ActForm::Q256},    {QType::IQ1_S, "IQ1_S", 256, 50, ActForm::Q256},
      {QType::IQ1_M, "IQ1_M", 256, 56, ActForm::Q256},     {QType::Q4_1, "Q4_1", 32, 20, ActForm::Q32},
      {QType::Q5_0, "Q5_0", 32, 22, ActForm::Q32},         {QType::Q5_1, "Q5_1", 32, 24, ActForm::Q32},
      {QType::Q2_K, "Q2_K", 256, 84, ActForm::Q256},       {QType::Q3_K, "Q3_K", 256, 110, ActForm::Q256},
      {QType::IQ4_NL, "IQ4_NL", 32, 18, ActForm::Q32},     {QType::TQ1_0, "TQ1_0", 256, 54, ActForm::Q256},
      {QType::TQ2_0, "TQ2_0", 256, 66, ActForm::Q256},     {QType::NVFP4, "NVFP4", 64, 36, ActForm::Q32},
      {QType::Q1_0, "Q1_0", 128, 18, ActForm::Q32},        {QType::F8_E4M3, "F8_E4M3", 4, 4, ActForm::Float},
  };
  return infos;
}

const QTypeInfo& qtype_info(QType type) {
  if (is_grouped(type)) return grouped_info(type);
  for (const QTypeInfo& info : qtype_infos())
    if (info.type == type) return info;
  throw std::invalid_argument("no kernel for ggml type " + std::to_string(static_cast<int>(type)));
}

}  // namespace kt
