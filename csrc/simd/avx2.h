// The AVX2 + FMA + F16C SIMD layer: 16 virtual lanes as two 256-bit registers (a: lanes 0-7, b: lanes 8-15). With
// KT_VNNI (x86.h), also of processors with AVX-VNNI. What differs are products of bytes, which are in a file of their
// own. See simd/scalar.h for what each name means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd/x86.h"

namespace {

constexpr int kFloatTokens = 3, kPackedTokens = 5, kQueryTokens = 6, kFp8Few = 1, kFp8Staged = 6;
constexpr int kScanVectors = 1, kScanTokens = 2;
constexpr int kStepUnroll = 8;    // of loops over the steps of a block
constexpr int kPairedTokens = 1;  // see avx512.h

struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
struct vm { __m256 a, b; };
struct wb { __m256i a, b; };
using uacc = vi;

inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline vi lanes_below(int n) {
  const __m256i count = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
inline vf load_n(const float* p, int n) {
  const vi m = lanes_below(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
inline void store_n(float* p, vf x, int n) {
  const vi m = lanes_below(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
inline vf set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf max_(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf min_(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf fma_(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }

inline vi loadi(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline vi set1i(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
inline vi addi(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vi subi(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline vi andi(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline vi ori(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline vi maxi(vi x, vi y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> inline vi shl(vi x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline vi sar(vi x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
inline vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vi to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline vi bits(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline vf from_bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

inline vm less(vf x, vf y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline vm unordered(vf x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
inline vm lane_range(int lo, int hi) {
  const vi below = lanes_below(hi), skip = lanes_below(lo);
  return {_mm256_castsi256_ps(_mm256_andnot_si256(skip.a, below.a)),
          _mm256_castsi256_ps(_mm256_andnot_si256(skip.b, below.b))};
}
inline vf select(vm m, vf x, vf y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }

inline float reduce_add(vf x) { return reduce8f(_mm256_add_ps(x.a, x.b)); }
inline float reduce_max(vf x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t reduce_maxi(vi x) {
  const __m256i h = _mm256_max_epi32(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1));
  return _mm_cvtsi128_si32(q);
}

inline uint32_t mask_bits(vm m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}

// ---- 8 lanes of fp64 ----
struct vd { __m256d a, b; };
inline vd setd(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline vd addd(vd x, vd y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
inline vd subd(vd x, vd y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
inline vd muld(vd x, vd y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
inline vd fmad(vd x, vd y, vd z) { return {_mm256_fmadd_pd(x.a, y.a, z.a), _mm256_fmadd_pd(x.b, y.b, z.b)}; }
inline vd maxd(vd x, vd y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }
inline void stored(double* p, vd x) {
  _mm256_storeu_pd(p, x.a);
  _mm256_storeu_pd(p + 4, x.b);
}
inline void widen(vf x, vd* low, vd* high) {
  *low = {_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1))};
  *high = {_mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))};
}
inline __m256d exponent_half(__m256d x, __m256d t) {
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(x), _mm256_slli_epi64(_mm256_castpd_si256(t), 52)));
}
inline vd add_exponent(vd x, vd t) { return {exponent_half(x.a, t.a), exponent_half(x.b, t.b)}; }
inline vd keep_from(vd x, vd least) {
  return {_mm256_and_pd(_mm256_cmp_pd(x.a, least.a, _CMP_GE_OQ), x.a),
          _mm256_and_pd(_mm256_cmp_pd(x.b, least.b, _CMP_GE_OQ), x.b)};
}

inline void store_int8(int8_t* p, vi x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline vi load_s8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 bf16_half(const uint8_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline vf load_bf16(const uint8_t* p) { return {bf16_half(p), bf16_half(p + 16)}; }
inline void store_bf16(uint16_t* p, vf x) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16),
                high = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}
inline vf load_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline vf halves_to_float(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
// 16 pairs of FP8 codes: the values / 256 of the first and of the second ones, see fp8.inl.
inline void fp8_pair(const uint8_t* p, vf* first, vf* second) {
  const __m256i codes = load32(p), mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  *first = halves_to_float(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1), mask));
  *second = halves_to_float(_mm256_and_si256(_mm256_srai_epi16(codes, 1), mask));
}
// 8 x 8 words: rows src[0..7] at byte offset `at`; column c goes to dst + c * 64.
inline void transpose8(const uint8_t* const* src, size_t at, uint8_t* dst) {
  __m256 r[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(src[i] + at));
  transpose8x8(r);
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(reinterpret_cast<float*>(dst + i * 64), r[i]);
}
inline void transpose16(const uint8_t* const* src, uint8_t* dst) {
  transpose8(src, 0, dst);
  transpose8(src + 8, 0, dst + 32);
  transpose8(src, 32, dst + 512);
  transpose8(src + 8, 32, dst + 544);
}

inline wb load_wb(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void store_wb(uint8_t* p, wb x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline void storei(int32_t* p, vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline wb or_bytes(wb x, wb y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline wb low_nibbles(wb x) { return {andb(x.a, 15), andb(x.b, 15)}; }
inline wb high_nibbles(wb x) { return {shr_mask<4>(x.a, 15), shr_mask<4>(x.b, 15)}; }
// Bits K .. of every byte to bit 4 ..: one bit, or two.
template <int K> inline __m256i to_bit4(__m256i x, int mask) {
  if constexpr (K < 4) return mask_shl<4 - K>(x, mask << K);
  return shr_mask<(K < 4 ? 0 : K - 4)>(x, mask << 4);
}
template <int K> inline wb bit_at_4(wb x) { return {to_bit4<K>(x.a, 1), to_bit4<K>(x.b, 1)}; }
template <int K> inline wb two_at_4(wb x) { return {to_bit4<K>(x.a, 3), to_bit4<K>(x.b, 3)}; }
// Bits FROM .. of every byte, as many as `mask` has, to bit TO ..
template <int FROM, int TO> inline __m256i move_half(__m256i x, int mask) {
  if constexpr (FROM < TO) return mask_shl<TO - FROM>(x, mask << FROM);
  if constexpr (FROM == TO) return andb(x, mask << TO);
  return shr_mask<(FROM > TO ? FROM - TO : 0)>(x, mask << TO);
}
template <int FROM, int TO> inline wb move_bits(wb x, int mask) {
  return {move_half<FROM, TO>(x.a, mask), move_half<FROM, TO>(x.b, mask)};
}
inline wb add_bytes(wb x, wb y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
inline __m256i first_digit(__m256i x) {  // 3 (x - 1) / 4, rounded up twice, has the digit in its upper two bits
  const __m256i less = _mm256_subs_epu8(x, _mm256_set1_epi8(1));
  return shr_mask<6>(_mm256_avg_epu8(less, _mm256_avg_epu8(less, _mm256_setzero_si256())), 3);
}
inline wb first_digit(wb x) { return {first_digit(x.a), first_digit(x.b)}; }
// 32 bytes: two int16 in every lane.
inline vi pairs_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline vi pairs_s8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline vi times32(vi x) { return {_mm256_slli_epi16(x.a, 5), _mm256_slli_epi16(x.b, 5)}; }
inline vi times4(vi x) { return {_mm256_slli_epi16(x.a, 2), _mm256_slli_epi16(x.b, 2)}; }
// The first and the second of the pairs, as int32.
inline vi lane_scale_low(vi x) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(x.a, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(x.b, 16), 16)};
}
inline vi lane_scale_high(vi x) { return {_mm256_srai_epi32(x.a, 16), _mm256_srai_epi32(x.b, 16)}; }
inline vi mul_words(vi x, vi y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline vi add_times(vi total, vi x, vi y) {
  return {_mm256_add_epi32(total.a, _mm256_mullo_epi32(x.a, y.a)),
          _mm256_add_epi32(total.b, _mm256_mullo_epi32(x.b, y.b))};
}
inline wb lookup16(wb x, const uint8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
}
// ---- for types with a grid, see kernels/packed/grid.inl ----
inline vi lanes_of(wb x) { return {x.a, x.b}; }
inline wb xor_bytes(wb x, wb y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline wb bits_from(wb x, int shift, int mask) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  return {andb(_mm256_srl_epi16(x.a, count), mask), andb(_mm256_srl_epi16(x.b, count), mask)};
}
inline void store_pairs_half(__m128i low, __m128i high, uint16_t* out) {
  const __m256i above = _mm256_slli_epi16(_mm256_cvtepu8_epi16(high), 8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_or_si256(_mm256_cvtepu8_epi16(low), above));
}
inline void store_pairs_of_bytes(wb low, wb high, uint16_t* out) {
  store_pairs_half(_mm256_castsi256_si128(low.a), _mm256_castsi256_si128(high.a), out);
  store_pairs_half(_mm256_extracti128_si256(low.a, 1), _mm256_extracti128_si256(high.a, 1), out + 16);
  store_pairs_half(_mm256_castsi256_si128(low.b), _mm256_castsi256_si128(high.b), out + 32);
  store_pairs_half(_mm256_extracti128_si256(low.b, 1), _mm256_extracti128_si256(high.b, 1), out + 48);
}
template <int WHICH> inline __m256i words_of(wb x) {
  const __m256 mixed = _mm256_shuffle_ps(_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b), WHICH == 0 ? 0x88 : 0xdd);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xd8);
}
inline void split_pairs(wb x, wb y, wb* even, wb* odd) {
  *even = {words_of<0>(x), words_of<0>(y)};
  *odd = {words_of<1>(x), words_of<1>(y)};
}
template <int J> inline wb spread_byte(wb x) {
  const __m128i pattern =
      _mm_add_epi8(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm_set1_epi8(J));
  const __m256i both = _mm256_broadcastsi128_si256(pattern);
  return {_mm256_shuffle_epi8(x.a, both), _mm256_shuffle_epi8(x.b, both)};
}
inline __m256i negate_half(__m256i x, __m256i signs, __m256i bits) {
  const __m256i minus = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bits), bits);
  return _mm256_sub_epi8(_mm256_xor_si256(x, minus), minus);
}
template <int BIT, uint8_t FLIP> inline wb negate_bytes(wb x, wb signs) {
  const __m256i bits = _mm256_set1_epi32(0x08040201 << BIT);
  const wb value =
      FLIP == 0 ? x
                : xor_bytes(x, {_mm256_set1_epi8(static_cast<char>(FLIP)), _mm256_set1_epi8(static_cast<char>(FLIP))});
  return {negate_half(value.a, signs.a, bits), negate_half(value.b, signs.b, bits)};  // 128 - x is -(128 + x)
}
inline __m256i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
inline uacc uacc_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

}  // namespace

#if defined(KT_VNNI)
#include "simd/products_vnni.h"
#else
#include "simd/products_avx2.h"
#endif
#include "simd/dot_rows.h"

namespace {

inline vi reduce_rows(const vp* p) { return {reduce8(p), reduce8(p + 8)}; }

// 16 words of 16 rows to dst[word][row]: an F32 column at a time.
inline void store_columns16(const uint8_t* const* rows, int64_t at, float* dst) {
  const uint8_t* src[16];
  for (int r = 0; r < 16; ++r) src[r] = rows[r] + at;
  transpose16(src, reinterpret_cast<uint8_t*>(dst));
}

inline vi pair_dot(vi total, vi a, const int16_t* y) {
  const __m256i yy = broadcast4(y);
  return {madd_add(total.a, a.a, yy), madd_add(total.b, a.b, yy)};
}

}  // namespace
