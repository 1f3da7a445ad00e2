// The avx512_bf16 tier: the avx512 tier with products of bf16.
#include "simd/avx512.h"
#include "simd/bf16_avx512.h"

#include "tiers/with_bf16.inl"

namespace kt {

const KernelTable& table_avx512_bf16() {
  static const KernelTable table = with_bf16(table_avx512(), "avx512_bf16");
  return table;
}

}  // namespace kt
