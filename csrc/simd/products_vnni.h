// Products of bytes that are summed in int32 at once, in registers of 32 bytes (AVX-VNNI). Included by simd/avx2.h.
// AVX-VNNI-INT8 has products of two signed factors. They would save one addition a block, see sdot_init.
#pragma once

namespace {

constexpr bool kNarrowSums = false;
constexpr uint8_t kSignFlip = 0x80;  // products want unsigned weights, see avx512.h
constexpr int kQuantTokens = 4;
template <int C> constexpr bool kHalvesApart = C > 1;  // see products_avx2.h

inline wb flip_signs(wb x) {
  const __m256i flip = _mm256_set1_epi8(static_cast<char>(kSignFlip));
  return {_mm256_xor_si256(x.a, flip), _mm256_xor_si256(x.b, flip)};
}
inline wb load_signed(const uint8_t* p) { return flip_signs(load_wb(p)); }
// The first and the second of the pairs, as flush_scaled wants a scale.
inline vi scale_low(vi x) { return lane_scale_low(x); }
inline vi scale_high(vi x) { return lane_scale_high(x); }
inline int32_t scale_lane(int scale) { return scale; }

inline void pair_sums32(const int8_t*, int16_t*) {}            // for narrow sums
inline uacc uacc_pair(const int16_t*) { return uacc_zero(); }  // for narrow sums
inline uacc udot(uacc acc, wb w, const int8_t* y) {
  const __m256i yy = broadcast4(y);
  return {add_products(acc.a, w.a, yy), add_products(acc.b, w.b, yy)};
}
inline vi flush_scaled(vi total, uacc acc, vi scale) { return add_times(total, acc, scale); }
inline vi flush(vi total, uacc acc) { return addi(total, acc); }
// The weights are staged as q + 128, so the sum starts at -128 times the sum of the block's activations.
inline vi sdot_init(int sum) { return set1i(-128 * sum); }
inline vi sdot(vi acc, wb w, const int8_t* y) { return udot(acc, w, y); }

// ---- for types with a grid, see products_avx2.h ----
using grid_scale = int32_t;
inline __m256i add_grid(__m256i sum, __m256i w, __m256i y) { return add_products(sum, w, y); }
inline __m256i scale_grid(__m256i sum, __m256i scale) { return _mm256_mullo_epi32(sum, scale); }

}  // namespace
