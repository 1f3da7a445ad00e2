// Products of bf16 for layers without the instruction, by two fused multiplications. See simd/bf16_scalar.h for what
// each name means. Included by a tier file after simd/avx2.h or simd/avx512.h.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// Subnormal operands and results count as zeros where FlushSubnormals says so.
inline vf dot_bf16(vf acc, wb pairs, const uint16_t* x) {
  uint32_t word;
  std::memcpy(&word, x, 4);
  const vi lanes = lanes_of(pairs), both = set1i(static_cast<int32_t>(word)), odd = set1i(-65536);
  acc = fma_(from_bits(andi(lanes, odd)), from_bits(andi(both, odd)), acc);
  return fma_(from_bits(shl<16>(lanes)), from_bits(shl<16>(both)), acc);
}

}  // namespace
