// The avx2 tier.
#include "simd/avx2.h"
#include "simd/bf16_fma.h"

#include "tiers/whole.inl"

namespace kt {

const KernelTable& table_avx2() {
  static constexpr KernelTable table = whole_tier("avx2");
  return table;
}

}  // namespace kt
