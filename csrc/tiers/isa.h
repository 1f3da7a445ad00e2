// Which instruction-set tiers this build has and this machine can run.
#pragma once
#include <string>
#include <vector>

#include "runtime/types.h"

namespace kt {

const KernelTable& table_scalar();
#if defined(KT_X86)
const KernelTable& table_avx2();
const KernelTable& table_avx512();
#endif
#if defined(KT_AVX512_BF16)
const KernelTable& table_avx512_bf16();
#endif
#if defined(KT_AMX)
const KernelTable& table_amx();
#endif
// Slow, for tests: no available tiers, found by name only.
const KernelTable& table_avx512_bf16_emulated();
const KernelTable& table_amx_emulated();

// Kernel tables that run here, slowest first; the scalar one is always there.
const std::vector<const KernelTable*>& available_tiers();

// The tier called `name`; throws std::invalid_argument that lists what there is.
const KernelTable& tier_by_name(const std::string& name);

// Sizes and activation form of a type; throws std::invalid_argument for one without a kernel.
const QTypeInfo& qtype_info(QType type);
const std::vector<QTypeInfo>& qtype_infos();

}  // namespace kt
