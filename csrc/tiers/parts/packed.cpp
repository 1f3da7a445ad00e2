// Re-laid types of Kernels::Packed, and which part has the kernels of the other types.
#include KT_SIMD

#include "tiers/products.inl"

#include "kernels/packed/dispatch.inl"

namespace kt {
namespace KT_PARTS {

void packed_tiles(const TileArgs* args, int count, bool has_vbmi) { ::packed_tiles(args, count, has_vbmi); }
void tile_by_blocks(const TileArgs& a) { ::tile_by_blocks(a); }
void pack_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) { ::pack_tile(type, rows, k, out); }

}  // namespace KT_PARTS
}  // namespace kt
