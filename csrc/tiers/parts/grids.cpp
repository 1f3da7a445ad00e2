// Types whose codes are looked up in a grid.
#include KT_SIMD

#include "tiers/products.inl"

namespace kt {
namespace KT_PARTS {

void packed_grid_tile(const TileArgs& a, bool has_vbmi) { ::packed_grid_tile(a, has_vbmi); }
void grid_rows_tile(const TileArgs& a) { ::grid_rows_tile(a); }
void pack_grid(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) { ::pack_grid(type, rows, k, out); }

}  // namespace KT_PARTS
}  // namespace kt
