// Which instruction-set tiers this build has and this machine can run.
#pragma once
#include <string>
#include <vector>

#include "runtime/types.h"

namespace kt {

// The tables of a tier's kernels; which ones a build has says CMakeLists.txt (KTRANSFORMERS_TIERS).
namespace scalar_tier {
const KernelTable& table();
}
namespace avx2_tier {
const KernelTable& table();
}
namespace avx_vnni_tier {
const KernelTable& table();
}
namespace avx512_vnni_tier {
const KernelTable& table();
}
namespace avx512_bf16_tier {
const KernelTable& table();
}
namespace amx_tier {
const KernelTable& table();
}
namespace neon_dotprod_tier {
const KernelTable& table();
}
namespace neon_i8mm_tier {
const KernelTable& table();
}
// Slow, for tests: no available tiers, found by name only.
namespace avx_vnni_emulated_tier {  // needs AVX2
const KernelTable& table();
}
namespace avx512_bf16_emulated_tier {
const KernelTable& table();
}
namespace amx_emulated_tier {
const KernelTable& table();
}

// Kernel tables that run here, slowest first; the scalar one is always there.
const std::vector<const KernelTable*>& available_tiers();

// Names of the tiers that this machine could run and this build lacks, slowest first.
const std::vector<std::string>& missing_tiers();

// The tier called `name`; throws std::invalid_argument that lists what there is.
const KernelTable& tier_by_name(const std::string& name);

}  // namespace kt
