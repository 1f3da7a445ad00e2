// The scalar tier.
#include "simd/scalar.h"
#include "simd/bf16_scalar.h"

#include "tiers/whole.inl"

namespace kt {

const KernelTable& table_scalar() {
  static constexpr KernelTable table = whole_tier("scalar");
  return table;
}

}  // namespace kt
