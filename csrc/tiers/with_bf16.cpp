// A tier that adds products of bf16 in vector registers to the tier of KT_PARTS.
#include KT_SIMD
#include KT_SIMD_BF16

#include "tiers/products.inl"

#include "kernels/bf16/bf16.inl"
#include "kernels/bf16/vector.inl"
#include "kernels/attention/kv.inl"
#include "kernels/attention/attention.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/pairs.inl"

#include "tiers/isa.h"

namespace {

// Its own choice, see packed/vbmi.inl.
void packed_tiles(const TileArgs* args, int count) { parts::packed_tiles(args, count, kHasVbmi); }

KernelTable with_bf16(KernelTable base) {
  base.name = KT_NAME;
  base.packed_tiles = packed_tiles;
  base.attention_span_bf16 = attention_span_bf16;
  base.bf16_tiles = bf16_tiles;
  base.round_bf16 = round_bf16;
  base.multiply_bf16 = multiply_bf16;
  return base;
}

}  // namespace

namespace kt {
namespace KT_TIER {

const KernelTable& table() {
  static const KernelTable table = with_bf16(KT_PARTS::table());
  return table;
}

}  // namespace KT_TIER
}  // namespace kt
