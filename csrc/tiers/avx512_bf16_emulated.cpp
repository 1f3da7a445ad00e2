// The scalar tier with the kernels of avx512_bf16 over emulated instructions, so that they are tested on every machine.
#include "simd/scalar.h"
#include "simd/bf16_scalar.h"

#include "tiers/with_bf16.inl"

namespace kt {

const KernelTable& table_avx512_bf16_emulated() {
  static const KernelTable table = with_bf16(table_scalar(), "avx512_bf16_emulated");
  return table;
}

}  // namespace kt
