// The avx512 tier.
#include "simd/avx512.h"
#include "simd/bf16_fma.h"

#include "tiers/whole.inl"

namespace kt {

const KernelTable& table_avx512() {
  static constexpr KernelTable table = whole_tier("avx512_vnni");
  return table;
}

}  // namespace kt
