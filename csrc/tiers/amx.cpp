// The amx tier: the avx512 tier with tile registers for the products of many tokens with re-laid weights, and of bf16.
#include "simd/avx512.h"
#include "simd/bf16_avx512.h"

#include "kernels/math.inl"
#include "kernels/quant.inl"
#include "kernels/gemm.inl"
#include "kernels/packed.inl"
#include "kernels/packing.inl"
#include "kernels/fp8.inl"
#include "simd/tiles_amx.h"

#include "kernels/amx.inl"
#include "kernels/bf16.inl"
#include "kernels/bf16_tiles.inl"

#include "tiers/isa.h"

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
