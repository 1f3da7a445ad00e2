// Re-laid types of formats/low.inl.
#include KT_SIMD

#include "tiers/products.inl"

namespace kt {
namespace KT_PARTS {

void low_tile(const TileArgs& a) { ::low_tile(a); }
void pack_low_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  ::pack_low_tile(type, rows, k, out);
}

}  // namespace KT_PARTS
}  // namespace kt
