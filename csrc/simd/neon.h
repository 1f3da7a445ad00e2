// The NEON SIMD layer (Armv8.2 with dot products): 16 virtual lanes as four 128-bit registers (a: lanes 0-3 .. d:
// 12-15). See simd/scalar.h for what each name means.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "runtime/types.h"

namespace {

using namespace kt;

constexpr bool kNarrowSums = false;
constexpr uint8_t kSignFlip = 0;
constexpr int kFloatTokens = 3, kQuantTokens = 4, kPackedTokens = 2, kQueryTokens = 6, kFp8Few = 1, kFp8Staged = 6;
constexpr int kScanVectors = 1, kScanTokens = 2;
constexpr int kStepUnroll = 4;                         // of loops over the steps of a block
template <int C> constexpr bool kHalvesApart = false;  // see products_avx2.h
constexpr int kPairedTokens = 2;                       // see avx512.h

struct vf { float32x4_t a, b, c, d; };
struct vi { int32x4_t a, b, c, d; };
struct vm { uint32x4_t a, b, c, d; };
struct wb { uint8x16_t a, b, c, d; };
using uacc = vi;

// clang-format off: what a quarter does is one line

// f of every register of one operand, of two, and of three.
template <class R, class X, class F> inline R each(X x, F f) { return {f(x.a), f(x.b), f(x.c), f(x.d)}; }
template <class R, class X, class Y, class F> inline R each(X x, Y y, F f) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}
template <class R, class X, class Y, class Z, class F> inline R each(X x, Y y, Z z, F f) {
  return {f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)};
}
#define KT_OF1(R, x, instruction) each<R>(x, [](auto p) { return instruction(p); })
#define KT_OF2(R, x, y, instruction) each<R>(x, y, [](auto p, auto q) { return instruction(p, q); })
#define KT_OF3(R, x, y, z, instruction) each<R>(x, y, z, [](auto p, auto q, auto r) { return instruction(p, q, r); })

// As in C, and on x86: the second one where there is a NaN.
inline float32x4_t greater_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t less_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

inline vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, vf x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline vf load_n(const float* p, int n) {
  if (n >= 16) return load(p);
  float copy[16] = {};
  std::memcpy(copy, p, sizeof *p * static_cast<size_t>(n));
  return load(copy);
}
inline void store_n(float* p, vf x, int n) {
  if (n >= 16) return store(p, x);
  float copy[16];
  store(copy, x);
  std::memcpy(p, copy, sizeof *p * static_cast<size_t>(n));
}
inline vf set1(float x) { const float32x4_t v = vdupq_n_f32(x); return {v, v, v, v}; }
inline vf zero() { return set1(0.0f); }
inline vf add(vf x, vf y) { return KT_OF2(vf, x, y, vaddq_f32); }
inline vf sub(vf x, vf y) { return KT_OF2(vf, x, y, vsubq_f32); }
inline vf mul(vf x, vf y) { return KT_OF2(vf, x, y, vmulq_f32); }
inline vf div(vf x, vf y) { return KT_OF2(vf, x, y, vdivq_f32); }
inline vf max_(vf x, vf y) { return KT_OF2(vf, x, y, greater_of); }
inline vf min_(vf x, vf y) { return KT_OF2(vf, x, y, less_of); }
inline vf fma_(vf x, vf y, vf z) { return KT_OF3(vf, z, x, y, vfmaq_f32); }

// Lanes 1, 0, 3, 2, ...
inline vf swap_neighbours(vf x) { return KT_OF1(vf, x, vrev64q_f32); }

inline vi loadi(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline void storei(int32_t* p, vi x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
inline vi set1i(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {v, v, v, v}; }
inline vi addi(vi x, vi y) { return KT_OF2(vi, x, y, vaddq_s32); }
inline vi subi(vi x, vi y) { return KT_OF2(vi, x, y, vsubq_s32); }
inline vi andi(vi x, vi y) { return KT_OF2(vi, x, y, vandq_s32); }
inline vi ori(vi x, vi y) { return KT_OF2(vi, x, y, vorrq_s32); }
inline vi maxi(vi x, vi y) { return KT_OF2(vi, x, y, vmaxq_s32); }
template <int N> inline vi shl(vi x) { return each<vi>(x, [](auto p) { return vshlq_n_s32(p, N); }); }
template <int N> inline vi sar(vi x) { return each<vi>(x, [](auto p) { return vshrq_n_s32(p, N); }); }
inline vf to_float(vi x) { return KT_OF1(vf, x, vcvtq_f32_s32); }
inline vi to_int(vf x) { return KT_OF1(vi, x, vcvtnq_s32_f32); }
inline vi bits(vf x) { return KT_OF1(vi, x, vreinterpretq_s32_f32); }
inline vf from_bits(vi x) { return KT_OF1(vf, x, vreinterpretq_f32_s32); }

inline vm less(vf x, vf y) { return KT_OF2(vm, x, y, vcltq_f32); }
inline vm unordered(vf x) { return each<vm>(x, [](auto p) { return vmvnq_u32(vceqq_f32(p, p)); }); }
inline vm lane_range(int lo, int hi) {
  const int32x4_t first = vdupq_n_s32(lo), end = vdupq_n_s32(hi);
  constexpr int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each<vm>(loadi(numbers), [&](auto p) { return vandq_u32(vcgeq_s32(p, first), vcltq_s32(p, end)); });
}
inline vf select(vm m, vf x, vf y) { return KT_OF3(vf, m, x, y, vbslq_f32); }

// The upper, and the lower halves of all lanes.
inline uint16x8_t upper_halves(float32x4_t x, float32x4_t y) {
  return vuzp2q_u16(vreinterpretq_u16_f32(x), vreinterpretq_u16_f32(y));
}
inline uint16x8_t lower_halves(uint32x4_t x, uint32x4_t y) {
  return vuzp1q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y));
}

inline float reduce_add(vf x) {
  const float32x4_t pairs = vpaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  return vpadds_f32(vget_low_f32(vpaddq_f32(pairs, pairs)));
}
inline float reduce_max(vf x) {
  float32x4_t q = greater_of(greater_of(x.a, x.c), greater_of(x.b, x.d));
  q = greater_of(q, vextq_f32(q, q, 2));
  return vgetq_lane_f32(greater_of(q, vextq_f32(q, q, 1)), 0);
}
inline int32_t reduce_maxi(vi x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }
inline uint32_t mask_bits(vm m) {
  const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(lower_halves(m.a, m.b)),
                                     vreinterpretq_u8_u16(lower_halves(m.c, m.d)));
  constexpr uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t set = vandq_u8(bytes, vld1q_u8(weights));
  return static_cast<uint32_t>(vaddv_u8(vget_low_u8(set))) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(set))) << 8;
}

// ---- 8 lanes of fp64 ----
struct vd { float64x2_t a, b, c, d; };
inline vd setd(double x) { const float64x2_t v = vdupq_n_f64(x); return {v, v, v, v}; }
inline vd addd(vd x, vd y) { return KT_OF2(vd, x, y, vaddq_f64); }
inline vd subd(vd x, vd y) { return KT_OF2(vd, x, y, vsubq_f64); }
inline vd muld(vd x, vd y) { return KT_OF2(vd, x, y, vmulq_f64); }
inline vd fmad(vd x, vd y, vd z) { return KT_OF3(vd, z, x, y, vfmaq_f64); }
inline vd maxd(vd x, vd y) { return each<vd>(x, y, [](auto p, auto q) { return vbslq_f64(vcgtq_f64(p, q), p, q); }); }
inline void stored(double* p, vd x) {
  vst1q_f64(p, x.a);
  vst1q_f64(p + 2, x.b);
  vst1q_f64(p + 4, x.c);
  vst1q_f64(p + 6, x.d);
}
inline void widen(vf x, vd* low, vd* high) {
  *low = {vcvt_f64_f32(vget_low_f32(x.a)), vcvt_high_f64_f32(x.a), vcvt_f64_f32(vget_low_f32(x.b)), vcvt_high_f64_f32(x.b)};
  *high = {vcvt_f64_f32(vget_low_f32(x.c)), vcvt_high_f64_f32(x.c), vcvt_f64_f32(vget_low_f32(x.d)), vcvt_high_f64_f32(x.d)};
}
inline vd add_exponent(vd x, vd t) {
  return each<vd>(x, t, [](auto p, auto q) {
    return vreinterpretq_f64_s64(vaddq_s64(vreinterpretq_s64_f64(p), vshlq_n_s64(vreinterpretq_s64_f64(q), 52)));
  });
}
inline vd keep_from(vd x, vd least) {
  return each<vd>(x, least, [](auto p, auto q) {
    return vreinterpretq_f64_u64(vandq_u64(vcgeq_f64(p, q), vreinterpretq_u64_f64(p)));
  });
}

inline void store_int8(int8_t* p, vi x) {
  const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(x.a), vreinterpretq_s16_s32(x.b)),
                  high = vuzp1q_s16(vreinterpretq_s16_s32(x.c), vreinterpretq_s16_s32(x.d));
  vst1q_s8(p, vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)));
}
inline vi widen_s8(int8x16_t x) {
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
inline vi load_s8(const uint8_t* p) { return widen_s8(vreinterpretq_s8_u8(vld1q_u8(p))); }
inline float32x4_t bf16_quarter(const uint8_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
inline vf load_bf16(const uint8_t* p) {
  return {bf16_quarter(p), bf16_quarter(p + 8), bf16_quarter(p + 16), bf16_quarter(p + 24)};
}
inline void store_bf16(uint16_t* p, vf x) {
  vst1q_u16(p, upper_halves(x.a, x.b));
  vst1q_u16(p + 8, upper_halves(x.c, x.d));
}
inline float half_to_float(const uint8_t* p) { __fp16 h; std::memcpy(&h, p, 2); return h; }
inline float32x4_t f16_quarter(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline vf load_f16(const uint8_t* p) {
  return {f16_quarter(p), f16_quarter(p + 8), f16_quarter(p + 16), f16_quarter(p + 24)};
}
inline vf halves_to_float(int16x8_t x, int16x8_t y) {
  const int16x8_t mask = vdupq_n_s16(static_cast<int16_t>(0xbf80));
  const float16x8_t low = vreinterpretq_f16_s16(vandq_s16(vshrq_n_s16(x, 1), mask)),
                    high = vreinterpretq_f16_s16(vandq_s16(vshrq_n_s16(y, 1), mask));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
}
// 16 pairs of FP8 codes: the values / 256 of the first and of the second ones, see fp8.inl.
inline void fp8_pair(const uint8_t* p, vf* first, vf* second) {
  const int16x8_t x = vreinterpretq_s16_u8(vld1q_u8(p)), y = vreinterpretq_s16_u8(vld1q_u8(p + 16));
  *first = halves_to_float(vshlq_n_s16(x, 8), vshlq_n_s16(y, 8));
  *second = halves_to_float(x, y);
}

// 4 x 4 words: rows src[0..3] at byte offset `at`; column c goes to dst + c * 64.
inline void transpose4(const uint8_t* const* src, size_t at, uint8_t* dst) {
  uint32x4_t r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) r[i] = vreinterpretq_u32_u8(vld1q_u8(src[i] + at));
  const uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1])), t1 = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1])),
                   t2 = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3])), t3 = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
  vst1q_u8(dst, vreinterpretq_u8_u64(vtrn1q_u64(t0, t2)));
  vst1q_u8(dst + 64, vreinterpretq_u8_u64(vtrn1q_u64(t1, t3)));
  vst1q_u8(dst + 128, vreinterpretq_u8_u64(vtrn2q_u64(t0, t2)));
  vst1q_u8(dst + 192, vreinterpretq_u8_u64(vtrn2q_u64(t1, t3)));
}
inline void transpose16(const uint8_t* const* src, uint8_t* dst) {
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) transpose4(src + 4 * r, static_cast<size_t>(16 * c), dst + 256 * c + 16 * r);
}
// 16 words of 16 rows to dst[word][row]: an F32 column at a time.
inline void store_columns16(const uint8_t* const* rows, int64_t at, float* dst) {
  const uint8_t* src[16];
  for (int r = 0; r < 16; ++r) src[r] = rows[r] + at;
  transpose16(src, reinterpret_cast<uint8_t*>(dst));
}

// In the order that it is written in, see simd/x86.h. As of an int64, whose addresses reach far.
inline void prefetch_line(const uint8_t* p) {
  asm volatile("prfm pldl1keep, %0" : : "m"(*reinterpret_cast<const int64_t*>(p)));
}
inline wb load_wb(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline void store_wb(uint8_t* p, wb x) {
  vst1q_u8(p, x.a);
  vst1q_u8(p + 16, x.b);
  vst1q_u8(p + 32, x.c);
  vst1q_u8(p + 48, x.d);
}
inline wb load_signed(const uint8_t* p) { return load_wb(p); }
inline wb or_bytes(wb x, wb y) { return KT_OF2(wb, x, y, vorrq_u8); }
inline wb xor_bytes(wb x, wb y) { return KT_OF2(wb, x, y, veorq_u8); }
inline wb add_bytes(wb x, wb y) { return KT_OF2(wb, x, y, vaddq_u8); }
// Bits FROM .. of every byte, as many as `mask` has, to bit TO ..
template <int FROM, int TO> inline uint8x16_t move_quarter(uint8x16_t x, int mask) {
  const uint8x16_t kept = vandq_u8(x, vdupq_n_u8(static_cast<uint8_t>(mask << FROM)));
  if constexpr (FROM < TO) return vshlq_n_u8(kept, TO - FROM);
  if constexpr (FROM > TO) return vshrq_n_u8(kept, FROM - TO);
  return kept;
}
template <int FROM, int TO> inline wb move_bits(wb x, int mask) {
  return each<wb>(x, [&](auto p) { return move_quarter<FROM, TO>(p, mask); });
}
inline wb low_nibbles(wb x) { return move_bits<0, 0>(x, 15); }
inline wb high_nibbles(wb x) { return each<wb>(x, [](auto p) { return vshrq_n_u8(p, 4); }); }
// Bits K .. of every byte to bit 4 ..: one bit, or two.
template <int K> inline wb bit_at_4(wb x) { return move_bits<K, 4>(x, 1); }
template <int K> inline wb two_at_4(wb x) { return move_bits<K, 4>(x, 3); }
inline wb first_digit(wb x) {  // 3 (x - 1) / 4, rounded up twice, has the digit in its upper two bits
  return each<wb>(x, [](auto p) {
    const uint8x16_t less = vqsubq_u8(p, vdupq_n_u8(1));
    return vshrq_n_u8(vrhaddq_u8(less, vrhaddq_u8(less, vdupq_n_u8(0))), 6);
  });
}
// 32 bytes: two int16 in every lane.
inline int32x4_t pairs_u8_quarter(const uint8_t* p) { return vreinterpretq_s32_u16(vmovl_u8(vld1_u8(p))); }
inline int32x4_t pairs_s8_quarter(const uint8_t* p) {
  return vreinterpretq_s32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
}
inline vi pairs_u8(const uint8_t* p) {
  return {pairs_u8_quarter(p), pairs_u8_quarter(p + 8), pairs_u8_quarter(p + 16), pairs_u8_quarter(p + 24)};
}
inline vi pairs_s8(const uint8_t* p) {
  return {pairs_s8_quarter(p), pairs_s8_quarter(p + 8), pairs_s8_quarter(p + 16), pairs_s8_quarter(p + 24)};
}
template <int N> inline vi shift_pairs(vi x) {
  return each<vi>(x, [](auto p) { return vreinterpretq_s32_s16(vshlq_n_s16(vreinterpretq_s16_s32(p), N)); });
}
inline vi times32(vi x) { return shift_pairs<5>(x); }
inline vi times4(vi x) { return shift_pairs<2>(x); }
// The first and the second of the pairs, as flush_scaled wants a scale.
inline vi scale_low(vi x) { return sar<16>(shl<16>(x)); }
inline vi scale_high(vi x) { return sar<16>(x); }
inline vi lane_scale_low(vi x) { return scale_low(x); }
inline vi lane_scale_high(vi x) { return scale_high(x); }
inline vi mul_words(vi x, vi y) { return KT_OF2(vi, x, y, vmulq_s32); }
inline vi add_times(vi total, vi x, vi y) { return KT_OF3(vi, total, x, y, vmlaq_s32); }
inline wb lookup16(wb x, const uint8_t* table) {
  const uint8x16_t t = vld1q_u8(table);
  return each<wb>(x, [&](auto p) { return vqtbl1q_u8(t, p); });
}
// ---- for types with a grid, see kernels/packed/grid.inl ----
inline vi lanes_of(wb x) { return KT_OF1(vi, x, vreinterpretq_s32_u8); }
inline wb bits_from(wb x, int shift, int mask) {
  const int8x16_t right = vdupq_n_s8(static_cast<int8_t>(-shift));
  const uint8x16_t kept = vdupq_n_u8(static_cast<uint8_t>(mask));
  return each<wb>(x, [&](auto p) { return vandq_u8(vshlq_u8(p, right), kept); });
}
inline void store_pairs_of_bytes(wb low, wb high, uint16_t* out) {
  uint8_t* p = reinterpret_cast<uint8_t*>(out);
  vst2q_u8(p, {{low.a, high.a}});
  vst2q_u8(p + 32, {{low.b, high.b}});
  vst2q_u8(p + 64, {{low.c, high.c}});
  vst2q_u8(p + 96, {{low.d, high.d}});
}
inline uint8x16_t even_words(uint8x16_t x, uint8x16_t y) {
  return vreinterpretq_u8_u32(vuzp1q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}
inline uint8x16_t odd_words(uint8x16_t x, uint8x16_t y) {
  return vreinterpretq_u8_u32(vuzp2q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}
inline void split_pairs(wb x, wb y, wb* even, wb* odd) {
  *even = {even_words(x.a, x.b), even_words(x.c, x.d), even_words(y.a, y.b), even_words(y.c, y.d)};
  *odd = {odd_words(x.a, x.b), odd_words(x.c, x.d), odd_words(y.a, y.b), odd_words(y.c, y.d)};
}
template <int J> inline wb spread_byte(wb x) {
  constexpr uint8_t words[16] = {J, J, J, J, J + 4, J + 4, J + 4, J + 4, J + 8, J + 8, J + 8, J + 8, J + 12, J + 12,
                                 J + 12, J + 12};
  const uint8x16_t pattern = vld1q_u8(words);
  return each<wb>(x, [&](auto p) { return vqtbl1q_u8(p, pattern); });
}
template <int BIT, uint8_t FLIP> inline wb negate_bytes(wb x, wb signs) {
  static_assert(FLIP == 0, "this tier multiplies signed weights");
  const uint8x16_t bits = vreinterpretq_u8_u32(vdupq_n_u32(0x08040201u << BIT));
  return each<wb>(x, signs, [&](auto p, auto s) {
    const uint8x16_t minus = vtstq_u8(s, bits);
    return vsubq_u8(veorq_u8(p, minus), minus);
  });
}

// ---- sums ----

inline int32x4_t broadcast4(const void* p) { int32_t word; std::memcpy(&word, p, 4); return vdupq_n_s32(word); }
inline uacc uacc_zero() { return set1i(0); }
inline void pair_sums32(const int8_t*, int16_t*) {}            // for narrow sums
inline uacc uacc_pair(const int16_t*) { return uacc_zero(); }  // for narrow sums
inline vi sdot_init(int) { return set1i(0); }
inline vi sdot(vi acc, wb w, const int8_t* y) {
  const int8x16_t yy = vreinterpretq_s8_s32(broadcast4(y));
  return each<vi>(acc, w, [&](auto sum, auto p) { return vdotq_s32(sum, vreinterpretq_s8_u8(p), yy); });
}
// Unsigned weights are below 128 in all types, for AVX2's sums of two products want that.
inline uacc udot(uacc acc, wb w, const int8_t* y) { return sdot(acc, w, y); }
inline vi flush_scaled(vi total, uacc acc, vi scale) { return add_times(total, acc, scale); }
inline vi flush(vi total, uacc acc) { return addi(total, acc); }
inline int32_t scale_lane(int scale) { return scale; }

// ---- what simd/x86.h gives the other tiers: bytes of quantized blocks, and dot products along one row ----

struct vb { uint8x16_t a, b; };
using vp = int32x4_t;            // partial sums of one row
struct vs { int32x4_t q[4]; };  // scale of each 16 weights of a super-block

inline vb loadb(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline void storeb(uint8_t* p, vb x) { vst1q_u8(p, x.a); vst1q_u8(p + 16, x.b); }
inline vb andb(vb x, int mask) { return {move_quarter<0, 0>(x.a, mask), move_quarter<0, 0>(x.b, mask)}; }
inline vb orb(vb x, vb y) { return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
template <int N> inline vb shr_mask(vb x, int mask) {
  return {move_quarter<N, 0>(x.a, mask), move_quarter<N, 0>(x.b, mask)};
}
template <int N> inline vb mask_shl(vb x, int mask) {
  return {move_quarter<0, N>(x.a, mask), move_quarter<0, N>(x.b, mask)};
}
inline vb nibbles16(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  return {vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8(x, 4)};
}
inline vp zerop() { return vdupq_n_s32(0); }
inline vp dot16(vp acc, uint8x16_t w, const int8_t* y) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), vld1q_s8(y)); }
inline vp dot_u8(vb w, const int8_t* y) { return dot16(dot16(zerop(), w.a, y), w.b, y + 16); }
inline vp dot_s8(const uint8_t* w, const int8_t* y) { return dot_u8(loadb(w), y); }
inline vs widen_scales(int8x16_t x) { const vi wide = widen_s8(x); return {{wide.a, wide.b, wide.c, wide.d}}; }
inline vs scales8(const uint8_t* sc) {  // below 64
  const int8x8_t x = vreinterpret_s8_u8(vld1_u8(sc));
  return widen_scales(vcombine_s8(vzip1_s8(x, x), vzip2_s8(x, x)));
}
inline vs scales16(const uint8_t* sc) { return widen_scales(vreinterpretq_s8_u8(vld1q_u8(sc))); }
template <int S> inline vp add_scaled(vp acc, vb w, const int8_t* y, const vs& scales) {
  acc = vmlaq_laneq_s32(acc, dot16(zerop(), w.a, y), scales.q[S / 2], S % 2 * 2);
  return vmlaq_laneq_s32(acc, dot16(zerop(), w.b, y + 16), scales.q[S / 2], S % 2 * 2 + 1);
}
inline vp mins_times(vp acc, int16x8_t m, const int16_t* sums) {
  const int16x8_t y = vld1q_s16(sums);
  return vmlal_high_s16(vmlal_s16(acc, vget_low_s16(m), vget_low_s16(y)), m, y);
}
inline vp dot_mins8(const uint8_t* m, const int16_t* sums) {
  return mins_times(zerop(), vreinterpretq_s16_u16(vmovl_u8(vld1_u8(m))), sums);
}
inline vp dot_mins16(const uint8_t* m, const int16_t* sums) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(m));
  return mins_times(mins_times(zerop(), vmovl_s8(vget_low_s8(x)), sums), vmovl_high_s8(x), sums + 8);
}
// Totals of 16 rows.
inline int32x4_t reduce4(const vp* p) { return vpaddq_s32(vpaddq_s32(p[0], p[1]), vpaddq_s32(p[2], p[3])); }
inline vi reduce_rows(const vp* p) { return {reduce4(p), reduce4(p + 4), reduce4(p + 8), reduce4(p + 12)}; }

// total += a[lane][0] * y[0] + a[lane][1] * y[1], int16 pairs.
inline void pair_dot_half(int32x4_t x, int32x4_t y, int16x4_t yy, int32x4_t* first, int32x4_t* second) {
  const int16x8_t p = vreinterpretq_s16_s32(x), q = vreinterpretq_s16_s32(y);
  const int16x8_t even = vuzp1q_s16(p, q), odd = vuzp2q_s16(p, q);
  *first = vmlal_lane_s16(vmlal_lane_s16(*first, vget_low_s16(even), yy, 0), vget_low_s16(odd), yy, 1);
  *second = vmlal_high_lane_s16(vmlal_high_lane_s16(*second, even, yy, 0), odd, yy, 1);
}
inline vi pair_dot(vi total, vi a, const int16_t* y) {
  const int16x4_t yy = vget_low_s16(vreinterpretq_s16_s32(broadcast4(y)));
  pair_dot_half(a.a, a.b, yy, &total.a, &total.b);
  pair_dot_half(a.c, a.d, yy, &total.c, &total.d);
  return total;
}

// ---- 8 columns of unquantized weights ----

struct v8 { float32x4_t a, b; };

inline v8 zero8() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
inline v8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store8(float* p, v8 x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
inline v8 load8_n(const float* p, int n) {
  float copy[8] = {};
  std::memcpy(copy, p, sizeof *p * static_cast<size_t>(n));
  return load8(copy);
}
inline v8 fma8(v8 x, v8 y, v8 z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
template <QType TYPE> inline v8 load_weights8(const uint8_t* p) {
  if constexpr (TYPE == QType::F32) return load8(reinterpret_cast<const float*>(p));
  if constexpr (TYPE == QType::F16) return {f16_quarter(p), f16_quarter(p + 8)};
  return {bf16_quarter(p), bf16_quarter(p + 8)};
}
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of two rows, in halves that are still to be added.
inline float32x4_t tree_halves(v8 x, v8 y) { return vpaddq_f32(vpaddq_f32(x.a, x.b), vpaddq_f32(y.a, y.b)); }
// acc[r] += tree sum of s[r], 8 of them.
inline void reduce8_add(const v8* s, float* acc) {
  for (int r = 0; r < 8; r += 4)
    vst1q_f32(acc + r, vaddq_f32(vld1q_f32(acc + r), vpaddq_f32(tree_halves(s[r], s[r + 1]), tree_halves(s[r + 2], s[r + 3]))));
}

#undef KT_OF1
#undef KT_OF2
#undef KT_OF3

}  // namespace

#include "simd/dot_rows.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "simd/neon_i8mm.h"
#endif
