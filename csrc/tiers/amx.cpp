// The amx tier: the avx512 tier with tile registers.
#include "simd/avx512.h"
#include "simd/bf16_avx512.h"
#include "simd/tiles_amx.h"

#include "tiers/with_tiles.inl"

namespace kt {

const KernelTable& table_amx() {
  static const KernelTable table = with_tiles(table_avx512(), "amx");
  return table;
}

}  // namespace kt
