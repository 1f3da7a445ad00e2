// What bf16.inl needs beyond simd/scalar.h.
#pragma once
#include "simd/bf16_emulated.h"
#include "simd/scalar.h"

namespace {

// table[bits N .. N + 3 of every lane]
template <int N> inline vf lookup_nibble(vf table, wb x) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = table.v[x.v[4 * i + N / 8] >> (N % 8) & 15];
  return r;
}
// 1 + byte J of every lane / 256, exact
template <int J> inline vf byte_fraction(wb x) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = 1.0f + static_cast<float>(x.v[4 * i + J]) / 256.0f;
  return r;
}
inline wb flip_signs(wb x) {
  for (uint8_t& b : x.v) b ^= 0x80;
  return x;
}
// The upper halves of 16 numbers and of 16 others in turns. A quiet NaN stays one.
inline void store_pairs(uint16_t* out, vf first, vf second) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 2; ++j) {
      uint32_t bits;
      std::memcpy(&bits, j == 0 ? &first.v[i] : &second.v[i], 4);
      out[2 * i + j] = static_cast<uint16_t>(bits >> 16);
    }
}
// See simd/x86.h. Here nothing changes the mode, so results are flushed one by one.
struct FlushSubnormals {
  FlushSubnormals() {}
};
inline vf flushed(vf x) {
  for (float& lane : x.v) lane = flush_subnormal(lane);
  return x;
}

// acc + the two products of bf16 in every lane with x[0], x[1], as VDPBF16PS defines it.
inline vf dot_bf16(vf acc, wb pairs, const uint16_t* x) {
  for (int i = 0; i < 16; ++i)
    for (int j = 1; j >= 0; --j)
      acc.v[i] = flush_subnormal(
          __builtin_fmaf(widen_bf16(pairs.v + 4 * i + 2 * j), widen_bf16(x + j), flush_subnormal(acc.v[i])));
  return acc;
}

}  // namespace
