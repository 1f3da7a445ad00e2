// Every kernel over one SIMD layer. Included by a tier file after it.
#include "tiers/products.inl"

#include "kernels/rows.inl"
#include "kernels/kv.inl"
#include "kernels/attention.inl"
#include "kernels/attention_bf16.inl"
#include "kernels/attention_pairs.inl"
#include "kernels/recurrent.inl"
#include "kernels/index.inl"
#include "kernels/sampling.inl"
#include "kernels/probe.inl"

#include "tiers/isa.h"

namespace {

constexpr KernelTable whole_tier(const char* name) {
  return {name,
          0,
          quantize_row,
          tile,
          packed_tiles,
          pack_tile,
          pack_fp8_tile,
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
}

}  // namespace
