// Products of bytes with AVX2 alone: in int16, two at a time. Included by simd/avx2.h.
#pragma once

namespace {

constexpr bool kNarrowSums = true;  // uacc holds int16: flushed before it can overflow
constexpr uint8_t kSignFlip = 0;
constexpr int kQuantTokens = 4;
// Whether C tokens are multiplied with the low nibbles of some lines first, then with the high ones: sums of both at
// once want more registers than there are.
template <int C> constexpr bool kHalvesApart = true;

inline wb load_signed(const uint8_t* p) { return load_wb(p); }
// The first and the second of the pairs, as flush_scaled wants a scale: in both halves of the lane.
inline vi scale_low(vi x) {
  return {_mm256_blend_epi16(x.a, _mm256_slli_epi32(x.a, 16), 0xaa),
          _mm256_blend_epi16(x.b, _mm256_slli_epi32(x.b, 16), 0xaa)};
}
inline vi scale_high(vi x) {
  return {_mm256_blend_epi16(_mm256_srli_epi32(x.a, 16), x.a, 0xaa),
          _mm256_blend_epi16(_mm256_srli_epi32(x.b, 16), x.b, 0xaa)};
}
// The pairs of 32 values, see ActForm::Q256: |sum| <= 8 * 127, so that -32 times it fits.
inline void pair_sums32(const int8_t* q, int16_t* out) {
  __m256i x = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load32(q));
  x = _mm256_add_epi16(x, _mm256_srli_si256(x, 8));
  x = _mm256_add_epi16(x, _mm256_srli_si256(x, 4));
  x = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(x, 5));
  const int32_t pairs[2] = {_mm256_extract_epi32(x, 0), _mm256_extract_epi32(x, 4)};
  std::memcpy(out, pairs, 8);
}
inline uacc uacc_pair(const int16_t* pair) { return {broadcast4(pair), broadcast4(pair)}; }
// GCC would re-associate sums: multiply everything first and spill the products. This makes it add them as written.
inline uacc in_order(uacc acc) {
  asm("" : "+x"(acc.a), "+x"(acc.b));
  return acc;
}
inline uacc udot(uacc acc, wb w, const int8_t* y) {
  const __m256i yy = broadcast4(y);
  return in_order(
      {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, yy)), _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, yy))});
}
inline vi flush_scaled(vi total, uacc acc, vi scale) {
  return {_mm256_add_epi32(total.a, _mm256_madd_epi16(acc.a, scale.a)),
          _mm256_add_epi32(total.b, _mm256_madd_epi16(acc.b, scale.b))};
}
inline vi flush(vi total, uacc acc) { return flush_scaled(total, acc, {_mm256_set1_epi16(1), _mm256_set1_epi16(1)}); }
// The scale is applied to int16 pairs, so it stands in both halves of the lane.
inline int32_t scale_lane(int scale) {
  const uint32_t half = static_cast<uint16_t>(scale);
  return static_cast<int32_t>(half | (half << 16));
}
inline vi sdot_init(int) { return uacc_zero(); }
inline __m256i sdot_half(__m256i acc, __m256i w, __m256i y) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline vi sdot(vi acc, wb w, const int8_t* y) {
  const __m256i yy = broadcast4(y);
  return in_order({sdot_half(acc.a, w.a, yy), sdot_half(acc.b, w.b, yy)});
}

// ---- for types with a grid, see kernels/packed/grid_narrow.inl ----
// Adds products to a sum of registers with the same scale. The scales of a row are int16.
using grid_scale = int16_t;
inline __m256i add_grid(__m256i sum, __m256i w, __m256i y) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, y)); }
inline __m256i scale_grid(__m256i sum, __m256i scale) { return _mm256_madd_epi16(sum, scale); }

}  // namespace
