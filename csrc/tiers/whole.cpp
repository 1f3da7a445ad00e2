// A tier that has all kernels, over one SIMD layer; products of packed weights are in its parts.
#include KT_SIMD
#include KT_SIMD_BF16

#include "tiers/products.inl"

#include "kernels/common/rows.inl"
#include "kernels/attention/kv.inl"
#include "kernels/attention/attention.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/pairs.inl"
#include "kernels/common/recurrent.inl"
#include "kernels/attention/index.inl"
#include "kernels/common/sampling.inl"
#include "kernels/common/probe.inl"

#include "tiers/isa.h"

namespace {

void packed_tiles(const TileArgs* args, int count) { parts::packed_tiles(args, count, kHasVbmi); }

}  // namespace

namespace kt {
namespace KT_TIER {

const KernelTable& table() {
  static constexpr KernelTable table = {KT_NAME,
                                        0,
                                        quantize_row,
                                        tile,
                                        ::packed_tiles,
                                        parts::pack_tile,
                                        parts::pack_fp8_tile,
                                        dequantize_row,
                                        rms_norm_row,
                                        softmax_row,
                                        rotate_row,
                                        add_row,
                                        activate,
                                        combine_row,
                                        attention_span,
                                        attention_span_bf16,
                                        attention_merge,
                                        attention_finish,
                                        store_kv,
                                        causal_conv,
                                        delta_scan,
                                        linear_scan,
                                        selective_scan,
                                        gated_norm_row,
                                        delta_gates_row,
                                        kScanCols,
                                        index_scores,
                                        block_maxima,
                                        token_weights,
                                        weight_sums,
                                        tokens_from,
                                        read_lines,
                                        multiply_registers,
                                        multiply_fp32};
  return table;
}

}  // namespace KT_TIER
}  // namespace kt
