// The scalar tier: every kernel, compiled with this tier's flags (see CMakeLists.txt) over this tier's SIMD layer.
// All of it has internal linkage, so that no function compiled here can stand in for another tier's.
#include "simd/scalar.h"

#include "kernels/math.inl"
#include "kernels/quant.inl"
#include "kernels/gemm.inl"
#include "kernels/packed.inl"
#include "kernels/packing.inl"
#include "kernels/fp8.inl"
#include "kernels/rows.inl"
#include "kernels/attention.inl"
#include "kernels/sampling.inl"
#include "kernels/probe.inl"

#include "tiers/isa.h"

namespace kt {

const KernelTable& table_scalar() {
  static constexpr KernelTable table = {
      "scalar", 0, quantize_row, tile, packed_tiles, pack_tile, pack_fp8_tile, dequantize_row, rms_norm_row,
      softmax_row, rotate_row, add_row, activate, combine_row, attention_span, attention_merge, attention_finish,
      block_maxima, token_weights, weight_sums, tokens_from, read_lines, multiply_registers};
  return table;
}

}  // namespace kt
