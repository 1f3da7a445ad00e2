// The amx tier: the avx512 tier with tile registers for the products of many tokens with re-laid weights, and of bf16.
#include "simd_avx512.h"
#include "simd_bf16_avx512.h"

#include "math.inl"
#include "quant.inl"
#include "gemm.inl"
#include "packed.inl"
#include "packing.inl"
#include "fp8.inl"
#include "tiles_amx.h"

#include "amx.inl"
#include "bf16.inl"
#include "bf16_tiles.inl"

#include "isa.h"

namespace kt {

const KernelTable& table_amx() {
  static const KernelTable table = [] {
    KernelTable made = table_avx512();
    made.name = "amx";
    made.packed_tiles = tiles_packed_tiles;
    made.min_block_tokens = kMinTileTokens;
    made.multiply_registers = multiply_tiles;
    made.bf16_tiles = bf16_tiles;
    made.round_bf16 = round_bf16;
    made.multiply_bf16 = multiply_bf16;
    return made;
  }();
  return table;
}

}  // namespace kt
