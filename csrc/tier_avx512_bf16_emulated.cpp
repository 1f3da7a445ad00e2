// The scalar tier with the kernels of avx512_bf16 over emulated instructions, so that they are tested on every machine.
#include "simd_scalar.h"
#include "simd_bf16_scalar.h"

#include "math.inl"
#include "quant.inl"
#include "gemm.inl"
#include "packed.inl"
#include "packing.inl"
#include "fp8.inl"
#include "bf16.inl"
#include "bf16_vector.inl"

#include "isa.h"

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
