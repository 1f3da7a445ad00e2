// The AVX-512 (F, BW, VL, DQ, VNNI) SIMD layer: 16 lanes are one register.
// See simd/scalar.h for what each name means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd/x86.h"

namespace {

constexpr bool kNarrowSums = false;
constexpr uint8_t kSignFlip = 0x80;  // vpdpbusd wants unsigned weights: Q8_0 is staged as q + 128, see sdot_init
constexpr int kFloatTokens = 6, kQuantTokens = 8, kPackedTokens = 4, kQueryTokens = 12, kFp8Few = 4, kFp8Staged = 12;
constexpr int kScanVectors = 2, kScanTokens = 4;
constexpr int kStepUnroll = 8;                         // of loops over the steps of a block
template <int C> constexpr bool kHalvesApart = false;  // see products_avx2.h
constexpr int kPairedTokens = 3;  // that have two sums each at a time, of signed weights: four are slower

struct vf { __m512 v; };
struct vi { __m512i v; };
struct vm { __mmask16 m; };
struct wb { __m512i v; };
using uacc = vi;

// Lanes 0 .. n - 1; n may lie outside 0 .. 16.
inline __mmask16 lanes_below(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u); }
inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
inline vf load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n), p)}; }
inline void store_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x.v); }
inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf zero() { return {_mm512_setzero_ps()}; }
inline vf add(vf x, vf y) { return {_mm512_add_ps(x.v, y.v)}; }
inline vf sub(vf x, vf y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline vf mul(vf x, vf y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline vf div(vf x, vf y) { return {_mm512_div_ps(x.v, y.v)}; }
inline vf max_(vf x, vf y) { return {_mm512_max_ps(x.v, y.v)}; }
inline vf min_(vf x, vf y) { return {_mm512_min_ps(x.v, y.v)}; }
inline vf fma_(vf x, vf y, vf z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }

inline vi loadi(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline vi set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline vi addi(vi x, vi y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline vi subi(vi x, vi y) { return {_mm512_sub_epi32(x.v, y.v)}; }
inline vi andi(vi x, vi y) { return {_mm512_and_si512(x.v, y.v)}; }
inline vi ori(vi x, vi y) { return {_mm512_or_si512(x.v, y.v)}; }
inline vi maxi(vi x, vi y) { return {_mm512_max_epi32(x.v, y.v)}; }
template <int N> inline vi shl(vi x) { return {_mm512_slli_epi32(x.v, N)}; }
template <int N> inline vi sar(vi x) { return {_mm512_srai_epi32(x.v, N)}; }
inline vf to_float(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline vi to_int(vf x) { return {_mm512_cvtps_epi32(x.v)}; }
inline vi bits(vf x) { return {_mm512_castps_si512(x.v)}; }
inline vf from_bits(vi x) { return {_mm512_castsi512_ps(x.v)}; }

inline vm less(vf x, vf y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ)}; }
inline vm unordered(vf x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
inline vm lane_range(int lo, int hi) { return {static_cast<__mmask16>(lanes_below(hi) & ~lanes_below(lo))}; }
inline vf select(vm m, vf x, vf y) { return {_mm512_mask_blend_ps(m.m, y.v, x.v)}; }

inline float reduce_max(vf x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t reduce_maxi(vi x) { return _mm512_reduce_max_epi32(x.v); }

// Lanes 1, 0, 3, 2, ...
inline vf swap_neighbours(vf x) { return {_mm512_permute_ps(x.v, 0xb1)}; }
inline uint32_t mask_bits(vm m) { return m.m; }

// ---- 8 lanes of fp64 ----
struct vd { __m512d v; };
inline vd setd(double x) { return {_mm512_set1_pd(x)}; }
inline vd addd(vd x, vd y) { return {_mm512_add_pd(x.v, y.v)}; }
inline vd subd(vd x, vd y) { return {_mm512_sub_pd(x.v, y.v)}; }
inline vd muld(vd x, vd y) { return {_mm512_mul_pd(x.v, y.v)}; }
inline vd fmad(vd x, vd y, vd z) { return {_mm512_fmadd_pd(x.v, y.v, z.v)}; }
inline vd maxd(vd x, vd y) { return {_mm512_max_pd(x.v, y.v)}; }
inline void stored(double* p, vd x) { _mm512_storeu_pd(p, x.v); }
inline void widen(vf x, vd* low, vd* high) {
  low->v = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  high->v = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
}
inline vd add_exponent(vd x, vd t) {
  return {
      _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(x.v), _mm512_slli_epi64(_mm512_castpd_si512(t.v), 52)))};
}
inline vd keep_from(vd x, vd least) { return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x.v, least.v, _CMP_GE_OQ), x.v)}; }

inline void store_int8(int8_t* p, vi x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v)); }
inline vi load_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline vf load_bf16(const uint8_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store_bf16(uint16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x.v), 16)));
}
inline vf load_f16(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// 16 pairs of FP8 codes: the values / 256 of the first and of the second ones, see fp8.inl.
inline void fp8_pair(const uint8_t* p, vf* first, vf* second) {
  const __m256i codes = load32(p), mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  first->v = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1), mask));
  second->v = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(codes, 1), mask));
}

inline void transpose16(const uint8_t* const* src, uint8_t* dst) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4g + j] holds, in its four 128-bit quarters, columns j, 4 + j, 8 + j, 12 + j of rows 4g .. 4g + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i lo01 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44), hi01 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xee);
    const __m512i lo23 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
    const __m512i hi23 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xee);
    _mm512_storeu_si512(dst + 64 * j, _mm512_shuffle_i32x4(lo01, lo23, 0x88));
    _mm512_storeu_si512(dst + 64 * (4 + j), _mm512_shuffle_i32x4(lo01, lo23, 0xdd));
    _mm512_storeu_si512(dst + 64 * (8 + j), _mm512_shuffle_i32x4(hi01, hi23, 0x88));
    _mm512_storeu_si512(dst + 64 * (12 + j), _mm512_shuffle_i32x4(hi01, hi23, 0xdd));
  }
}

inline wb load_wb(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_wb(uint8_t* p, wb x) { _mm512_storeu_si512(p, x.v); }
inline void storei(int32_t* p, vi x) { _mm512_storeu_si512(p, x.v); }
inline wb load_signed(const uint8_t* p) {  // see kSignFlip
  return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)))};
}
inline __m512i and_bytes(__m512i x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
inline wb or_bytes(wb x, wb y) { return {_mm512_or_si512(x.v, y.v)}; }
inline wb low_nibbles(wb x) { return {and_bytes(x.v, 15)}; }
inline wb high_nibbles(wb x) { return {and_bytes(_mm512_srli_epi16(x.v, 4), 15)}; }
// Bits K .. of every byte to bit 4 ..: one bit, or two.
template <int K> inline wb to_bit4(wb x, int mask) {
  if constexpr (K < 4) return {_mm512_slli_epi16(and_bytes(x.v, mask << K), 4 - K)};
  return {and_bytes(_mm512_srli_epi16(x.v, K < 4 ? 0 : K - 4), mask << 4)};
}
template <int K> inline wb bit_at_4(wb x) { return to_bit4<K>(x, 1); }
template <int K> inline wb two_at_4(wb x) { return to_bit4<K>(x, 3); }
// Bits FROM .. of every byte, as many as `mask` has, to bit TO ..
template <int FROM, int TO> inline wb move_bits(wb x, int mask) {
  if constexpr (FROM < TO) return {_mm512_slli_epi16(and_bytes(x.v, mask << FROM), TO - FROM)};
  if constexpr (FROM == TO) return {and_bytes(x.v, mask << TO)};
  return {and_bytes(_mm512_srli_epi16(x.v, FROM > TO ? FROM - TO : 0), mask << TO)};
}
inline wb add_bytes(wb x, wb y) { return {_mm512_add_epi8(x.v, y.v)}; }
inline wb first_digit(wb x) {  // 3 (x - 1) / 4, rounded up twice, has the digit in its upper two bits
  const __m512i less = _mm512_subs_epu8(x.v, _mm512_set1_epi8(1)), half = _mm512_avg_epu8(less, _mm512_setzero_si512());
  return {and_bytes(_mm512_srli_epi16(_mm512_avg_epu8(less, half), 6), 3)};
}
// 32 bytes: two int16 in every lane.
inline vi pairs_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline vi pairs_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline vi times32(vi x) { return {_mm512_slli_epi16(x.v, 5)}; }
inline vi times4(vi x) { return {_mm512_slli_epi16(x.v, 2)}; }
// The first and the second of the pairs, as flush_scaled wants a scale.
inline vi scale_low(vi x) { return {_mm512_srai_epi32(_mm512_slli_epi32(x.v, 16), 16)}; }
inline vi scale_high(vi x) { return {_mm512_srai_epi32(x.v, 16)}; }
inline vi lane_scale_low(vi x) { return scale_low(x); }
inline vi lane_scale_high(vi x) { return scale_high(x); }
inline vi mul_words(vi x, vi y) { return {_mm512_mullo_epi32(x.v, y.v)}; }
inline vi add_times(vi total, vi x, vi y) { return {_mm512_add_epi32(total.v, _mm512_mullo_epi32(x.v, y.v))}; }
inline vi shr3(vi x) { return {_mm512_srli_epi32(x.v, 3)}; }
inline vi both_halves(vi x) {
  return {_mm512_or_si512(_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(x.v, 16))};
}
inline wb times(wb x, vi m) { return {_mm512_mullo_epi16(x.v, m.v)}; }
inline void split_products(wb x, int offset, vi m, wb* low, wb* high) {
  const __m512i byte = _mm512_set1_epi16(0xff), shift = _mm512_set1_epi16(static_cast<int16_t>(offset));
  const __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(x.v, byte), shift), m.v);
  const __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(x.v, 8), shift), m.v);
  low->v = _mm512_ternarylogic_epi32(even, byte, _mm512_slli_epi16(odd, 8), 0xea);   // (even & byte) | odd << 8
  high->v = _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 8), byte, odd, 0xf2);  // even >> 8 | (odd & ~byte)
}
inline wb lookup16(wb x, const uint8_t* table) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x.v)};
}
// ---- for types with a grid, see kernels/packed/grid.inl ----
inline vi lanes_of(wb x) { return {x.v}; }
inline wb xor_bytes(wb x, wb y) { return {_mm512_xor_si512(x.v, y.v)}; }
inline wb bits_from(wb x, int shift, int mask) {
  return {and_bytes(_mm512_srl_epi16(x.v, _mm_cvtsi32_si128(shift)), mask)};
}
inline void store_pairs_of_bytes(wb low, wb high, uint16_t* out) {
  const __m512i first = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(low.v)),
                second = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(low.v, 1)),
                above = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(high.v)),
                above_second = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(high.v, 1));
  _mm512_storeu_si512(out, _mm512_or_si512(first, _mm512_slli_epi16(above, 8)));
  _mm512_storeu_si512(out + 32, _mm512_or_si512(second, _mm512_slli_epi16(above_second, 8)));
}
inline void split_pairs(wb x, wb y, wb* even, wb* odd) {
  const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even->v = _mm512_permutex2var_epi32(x.v, first, y.v);
  odd->v = _mm512_permutex2var_epi32(x.v, _mm512_or_si512(first, _mm512_set1_epi32(1)), y.v);
}
template <int J> inline wb spread_byte(wb x) {
  const __m128i pattern =
      _mm_add_epi8(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm_set1_epi8(J));
  return {_mm512_shuffle_epi8(x.v, _mm512_broadcast_i32x4(pattern))};
}
template <int BIT, uint8_t FLIP> inline wb negate_bytes(wb x, wb signs) {
  const __mmask64 minus = _mm512_test_epi8_mask(signs.v, _mm512_set1_epi32(0x08040201 << BIT));
  const __m512i value = FLIP == 0 ? x.v : _mm512_xor_si512(x.v, _mm512_set1_epi8(static_cast<char>(FLIP)));
  return {_mm512_mask_sub_epi8(value, minus, _mm512_setzero_si512(), value)};  // 128 - x is -(128 + x)
}
inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
inline uacc uacc_zero() { return {_mm512_setzero_si512()}; }
inline void pair_sums32(const int8_t*, int16_t*) {}            // for narrow sums
inline uacc uacc_pair(const int16_t*) { return uacc_zero(); }  // for narrow sums
inline uacc udot(uacc acc, wb w, const int8_t* y) { return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(y))}; }
inline vi flush_scaled(vi total, uacc acc, vi scale) {
  return {_mm512_add_epi32(total.v, _mm512_mullo_epi32(acc.v, scale.v))};
}
inline vi flush(vi total, uacc acc) { return addi(total, acc); }
inline int32_t scale_lane(int scale) { return scale; }
// The weights are staged as q + 128, so the sum starts at -128 times the sum of the block's activations.
inline vi sdot_init(int sum) { return set1i(-128 * sum); }
inline vi sdot(vi acc, wb w, const int8_t* y) { return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(y))}; }
inline vi reduce_rows(const vp* p) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(reduce8(p)), reduce8(p + 8), 1)};
}

inline __m256 fold(vf x) { return _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)); }
inline float reduce_add(vf x) { return reduce8f(fold(x)); }
// Where row r, column c (a multiple of 8) of a stage of 8 rows lies: two rows share a register.
inline int stage_at(int r, int c) { return r / 2 * (2 * kFloatCols) + 2 * c + r % 2 * 8; }
// s[c * 8 + r] = the 8 sums of w[r] . x[c] for the 8 rows of a stage and C vectors.
template <int C> inline void dot_rows8(const float* w, const float* const* x, int cols, v8* s) {
  __m512 sum[C][4];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sum[c][r] = _mm512_setzero_ps();
  const auto step = [&](int k, const auto& column) {
    __m512 v[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) v[c] = _mm512_broadcast_f32x8(column(c));
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const __m512 pair = _mm512_loadu_ps(w + stage_at(2 * r, k));
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sum[c][r] = _mm512_fmadd_ps(pair, v[c], sum[c][r]);
    }
  };
  const int full = cols / 8 * 8;
  for (int k = 0; k < full; k += 8) step(k, [&](int c) { return load8(x[c] + k); });
  if (full < cols) step(full, [&](int c) { return load8_n(x[c] + full, cols - full); });
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      s[c * 8 + 2 * r] = _mm512_castps512_ps256(sum[c][r]);
      s[c * 8 + 2 * r + 1] = _mm512_extractf32x8_ps(sum[c][r], 1);
    }
}
// 16 words of 16 rows to dst[word][row]: an F32 column at a time.
inline void store_columns16(const uint8_t* const* rows, int64_t at, float* dst) {
  const uint8_t* src[16];
  for (int r = 0; r < 16; ++r) src[r] = rows[r] + at;
  transpose16(src, reinterpret_cast<uint8_t*>(dst));
}

inline vi pair_dot(vi total, vi a, const int16_t* y) { return {_mm512_dpwssd_epi32(total.v, a.v, broadcast4(y))}; }

}  // namespace
