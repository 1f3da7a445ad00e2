// The avx512_bf16 tier: the avx512 tier with products of bf16.
#include "simd_avx512.h"
#include "simd_bf16_avx512.h"

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

const KernelTable& table_avx512_bf16() {
  static const KernelTable table = [] {
    KernelTable made = table_avx512();
    made.name = "avx512_bf16";
    made.bf16_tiles = bf16_tiles;
    made.round_bf16 = round_bf16;
    made.multiply_bf16 = multiply_bf16;
    return made;
  }();
  return table;
}

}  // namespace kt
