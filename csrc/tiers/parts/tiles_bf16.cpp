// Products of bf16 in tile registers.
#include KT_SIMD
#include KT_SIMD_BF16
#include KT_TILES

#include "tiers/products.inl"

#include "kernels/amx/amx.inl"
#include "kernels/bf16/bf16.inl"
#include "kernels/bf16/tiles.inl"

#include "tiers/tile_parts.h"

namespace kt {
namespace KT_TIER {

void bf16_tiles(const TileArgs* a, int count) { ::bf16_tiles(a, count); }
void round_bf16(const float* x, int64_t ldx, int64_t count, int64_t width, uint16_t* out, int64_t ldo) {
  ::round_bf16(x, ldx, count, width, out, ldo);
}
int64_t multiply_bf16(int64_t rounds, int32_t* out) { return ::multiply_bf16(rounds, out); }

}  // namespace KT_TIER
}  // namespace kt
