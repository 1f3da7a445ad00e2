// The scalar tier with the tile kernels over emulated registers, so that they are tested on every machine.
#include "simd_scalar.h"
#include "simd_bf16_scalar.h"

#include "math.inl"
#include "quant.inl"
#include "gemm.inl"
#include "packed.inl"
#include "packing.inl"
#include "fp8.inl"
#include "tiles_emulated.h"

#include "amx.inl"
#include "bf16.inl"
#include "bf16_tiles.inl"

#include "isa.h"

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
