// A tier with tile registers for the products of many tokens with re-laid weights, and of bf16. Included by a tier file
// after its SIMD layers.
#include "tiers/products.inl"

#include "kernels/amx/amx.inl"
#include "kernels/amx/blocks32.inl"
#include "kernels/amx/groups.inl"
#include "kernels/bf16/bf16.inl"
#include "kernels/bf16/tiles.inl"
#include "kernels/attention/kv.inl"
#include "kernels/attention/attention.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/tiles.inl"

#include "tiers/isa.h"

namespace {

KernelTable with_tiles(KernelTable base, const char* name) {
  base.name = name;
  base.packed_tiles = tiles_packed_tiles;
  base.min_block_tokens = kMinTileTokens;
  base.multiply_registers = multiply_tiles;
  base.attention_span_bf16 = attention_span_bf16;
  base.bf16_tiles = bf16_tiles;
  base.round_bf16 = round_bf16;
  base.multiply_bf16 = multiply_bf16;
  return base;
}

}  // namespace
