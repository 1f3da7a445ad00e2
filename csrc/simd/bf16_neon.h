// Products of bf16 by two fused multiplications. See simd/bf16_scalar.h for what each name means. Included by a tier
// file after simd/neon.h.
#pragma once
#include "simd/bf16_emulated.h"

namespace {

// Here nothing changes the mode, so results are flushed one by one: Arm's mode asks before rounding whether a result is
// subnormal, and a result that is rounded up to a normal number would be lost.
struct FlushSubnormals {
  FlushSubnormals() {}
};
inline vf flushed(vf x) {
  return each<vf>(x, [](auto p) {
    const uint32x4_t word = vreinterpretq_u32_f32(p);
    const uint32x4_t kept = vtstq_u32(word, vdupq_n_u32(0x7f800000u));
    return vreinterpretq_f32_u32(vandq_u32(word, vorrq_u32(kept, vdupq_n_u32(0x80000000u))));
  });
}

inline vf dot_bf16(vf acc, wb pairs, const uint16_t* x) {
  const vi lanes = lanes_of(pairs);
  acc = fma_(flushed(from_bits(andi(lanes, set1i(-65536)))), set1(widen_bf16(x + 1)), flushed(acc));
  return flushed(fma_(flushed(from_bits(shl<16>(lanes))), set1(widen_bf16(x)), flushed(acc)));
}

}  // namespace
