// A tier that adds to the tier of KT_PARTS tile registers for the products of many tokens with packed weights, for
// attention, and, in parts/tiles_bf16.cpp, for products of bf16.
#include KT_SIMD
#include KT_SIMD_BF16
#include KT_TILES

#include "tiers/products.inl"

#include "kernels/amx/amx.inl"
#include "kernels/amx/blocks32.inl"
#include "kernels/amx/groups.inl"
#include "kernels/attention/kv.inl"
#include "kernels/attention/attention.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/tiles.inl"

#include "tiers/isa.h"
#include "tiers/tile_parts.h"

namespace {

KernelTable with_tiles(KernelTable base) {
  base.name = KT_NAME;
  base.packed_tiles = tiles_packed_tiles;
  base.min_block_tokens = kMinTileTokens;
  base.multiply_registers = multiply_tiles;
  base.attention_span_bf16 = attention_span_bf16;
  base.bf16_tiles = KT_TIER::bf16_tiles;
  base.round_bf16 = KT_TIER::round_bf16;
  base.multiply_bf16 = KT_TIER::multiply_bf16;
  return base;
}

}  // namespace

namespace kt {
namespace KT_TIER {

const KernelTable& table() {
  static const KernelTable table = with_tiles(KT_PARTS::table());
  return table;
}

}  // namespace KT_TIER
}  // namespace kt
