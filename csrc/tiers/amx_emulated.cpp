// The scalar tier with the tile kernels over emulated registers, so that they are tested on every machine.
#include "simd/scalar.h"
#include "simd/bf16_scalar.h"

#include "kernels/math.inl"
#include "kernels/quant.inl"
#include "kernels/gemm.inl"
#include "kernels/packed.inl"
#include "kernels/packing.inl"
#include "kernels/fp8.inl"
#include "simd/tiles_emulated.h"

#include "kernels/amx.inl"
#include "kernels/bf16.inl"
#include "kernels/bf16_tiles.inl"

#include "tiers/isa.h"

namespace kt {

const KernelTable& table_amx_emulated() {
  static const KernelTable table = [] {
    KernelTable made = table_scalar();
    made.name = "amx_emulated";
    made.packed_tiles = tiles_packed_tiles;
    made.min_block_tokens = kMinTileTokens;
    made.multiply_registers = multiply_tiles;
    made.bf16_tiles = bf16_tiles;
    made.round_bf16 = round_bf16;
    return made;
  }();
  return table;
}

}  // namespace kt
