// The scalar tier with the tile kernels over emulated registers, so that they are tested on every machine.
#include "simd/scalar.h"
#include "simd/bf16_scalar.h"
#include "simd/tiles_emulated.h"

#include "tiers/with_tiles.inl"

namespace kt {

const KernelTable& table_amx_emulated() {
  static const KernelTable table = with_tiles(table_scalar(), "amx_emulated");
  return table;
}

}  // namespace kt
