// What instructions for bf16 do with single numbers, in plain C++.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

inline float flush_subnormal(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A subnormal counts as zero.
inline float widen_bf16(const void* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flush_subnormal(x);
}

}  // namespace
