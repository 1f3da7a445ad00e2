// A tier with products of bf16 in vector registers. Included by a tier file after its SIMD layers.
#include "tiers/products.inl"

#include "kernels/bf16/bf16.inl"
#include "kernels/bf16/vector.inl"
#include "kernels/attention/kv.inl"
#include "kernels/attention/attention.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/pairs.inl"

#include "tiers/isa.h"

namespace {

KernelTable with_bf16(KernelTable base, const char* name) {
  base.name = name;
  base.packed_tiles = packed_tiles;  // this copy may use more instructions, see grid_vbmi.inl
  base.attention_span_bf16 = attention_span_bf16;
  base.bf16_tiles = bf16_tiles;
  base.round_bf16 = round_bf16;
  base.multiply_bf16 = multiply_bf16;
  return base;
}

}  // namespace
