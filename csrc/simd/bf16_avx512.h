// What bf16.inl needs beyond simd/avx512.h. See simd/bf16_scalar.h for what each name means.
#pragma once
#include "simd/avx512.h"

namespace {

template <int N> inline vf lookup_nibble(vf table, wb x) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(x.v, N), table.v)};
}
template <int J> inline vf byte_fraction(wb x) {
  const __m512i moved =
      J < 2 ? _mm512_slli_epi32(x.v, J < 2 ? 15 - 8 * J : 0) : _mm512_srli_epi32(x.v, J < 2 ? 0 : 8 * J - 15);
  // (moved & mantissa) | one
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0x007f8000), _mm512_set1_epi32(0x3f800000), 0xea))};
}
inline wb flip_signs(wb x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(static_cast<char>(0x80)))}; }
inline void store_pairs(uint16_t* out, vf first, vf second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0x55555555u, _mm512_castps_si512(second.v), low));
}
#if defined(__AVX512BF16__)
inline vf dot_bf16(vf acc, wb pairs, const uint16_t* x) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(pairs.v), reinterpret_cast<__m512bh>(broadcast4(x)))};
}
#endif

}  // namespace
