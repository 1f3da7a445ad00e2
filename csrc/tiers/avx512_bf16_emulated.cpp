// The scalar tier with the kernels of avx512_bf16 over emulated instructions, so that they are tested on every machine.
#include "simd/scalar.h"
#include "simd/bf16_scalar.h"

#include "kernels/math.inl"
#include "kernels/quant.inl"
#include "kernels/gemm.inl"
#include "kernels/packed.inl"
#include "kernels/packing.inl"
#include "kernels/fp8.inl"
#include "kernels/bf16.inl"
#include "kernels/bf16_vector.inl"

#include "tiers/isa.h"

namespace kt {

const KernelTable& table_avx512_bf16_emulated() {
  static const KernelTable table = [] {
    KernelTable made = table_scalar();
    made.name = "avx512_bf16_emulated";
    made.bf16_tiles = bf16_tiles;
    made.round_bf16 = round_bf16;
    made.multiply_bf16 = multiply_bf16;
    return made;
  }();
  return table;
}

}  // namespace kt
