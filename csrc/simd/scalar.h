// The scalar tier's SIMD layer: 16 virtual lanes as arrays. The oracle that the vector tiers must equal bit for bit.
// Every layer defines the same names:
//   vf, vi, vm   16 floats, 16 int32, a mask of 16 lanes
//   wb           64 weight bytes: 4 consecutive columns of 16 rows
//   uacc         sums of unsigned weights times int8 activations, before they are scaled
#pragma once
#include <cstdint>
#include <cstring>

#include "runtime/types.h"

namespace {

using namespace kt;

constexpr bool kNarrowSums = false;  // uacc holds int32: any number of steps between two flushes
constexpr uint8_t kSignFlip = 0;     // Q8_0 weights are staged as they are
constexpr int kFloatTokens = 2, kQuantTokens = 2, kPackedTokens = 2, kQueryTokens = 2, kFp8Few = 2, kFp8Staged = 2;
constexpr int kScanVectors = 1, kScanTokens = 2;
constexpr int kStepUnroll = 2;                         // of loops over the steps of a block
template <int C> constexpr bool kHalvesApart = false;  // see products_avx2.h
constexpr int kPairedTokens = 4;                       // see avx512.h

struct vf { float v[16]; };
struct vi { int32_t v[16]; };
struct vm { bool v[16]; };
struct wb { uint8_t v[64]; };
using uacc = vi;

// clang-format off: what a lane does is one line

#define KT_LANES for (int i = 0; i < 16; ++i)
#define KT_BINARY(name, type, expr) inline type name(type a, type b) { type r; KT_LANES r.v[i] = (expr); return r; }

inline vf load(const float* p) { vf r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float* p, vf a) { std::memcpy(p, a.v, sizeof a.v); }
inline vf load_n(const float* p, int n) { vf r{}; std::memcpy(r.v, p, sizeof *p * static_cast<size_t>(n)); return r; }
inline void store_n(float* p, vf a, int n) { std::memcpy(p, a.v, sizeof(float) * static_cast<size_t>(n)); }
inline vf set1(float x) { vf r; KT_LANES r.v[i] = x; return r; }
inline vf zero() { return vf{}; }
KT_BINARY(add, vf, a.v[i] + b.v[i])
KT_BINARY(sub, vf, a.v[i] - b.v[i])
KT_BINARY(mul, vf, a.v[i] * b.v[i])
KT_BINARY(div, vf, a.v[i] / b.v[i])
KT_BINARY(max_, vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
KT_BINARY(min_, vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
inline vf fma_(vf a, vf b, vf c) { vf r; KT_LANES r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return r; }

// Lanes 1, 0, 3, 2, ...
inline vf swap_neighbours(vf x) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = x.v[i ^ 1];
  return r;
}
inline void store_bf16(uint16_t* p, vf x) {  // the upper halves
  for (int i = 0; i < 16; ++i) {
    uint32_t word;
    std::memcpy(&word, x.v + i, 4);
    p[i] = static_cast<uint16_t>(word >> 16);
  }
}
inline vi loadi(const int32_t* p) { vi r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline vi set1i(int32_t x) { vi r; KT_LANES r.v[i] = x; return r; }
KT_BINARY(addi, vi, a.v[i] + b.v[i])
KT_BINARY(subi, vi, a.v[i] - b.v[i])
KT_BINARY(andi, vi, a.v[i] & b.v[i])
KT_BINARY(ori, vi, a.v[i] | b.v[i])
KT_BINARY(maxi, vi, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
template <int N> inline vi shl(vi a) {
  KT_LANES a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
  return a;
}
template <int N> inline vi sar(vi a) { KT_LANES a.v[i] >>= N; return a; }
inline vf to_float(vi a) { vf r; KT_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
// Round to nearest, ties to even (the mode that the pool sets on every thread).
inline vi to_int(vf a) { vi r; KT_LANES r.v[i] = static_cast<int32_t>(__builtin_rintf(a.v[i])); return r; }
inline vi bits(vf a) { vi r; std::memcpy(r.v, a.v, sizeof r.v); return r; }
inline vf from_bits(vi a) { vf r; std::memcpy(r.v, a.v, sizeof r.v); return r; }

inline vm less(vf a, vf b) { vm r; KT_LANES r.v[i] = a.v[i] < b.v[i]; return r; }
inline vm unordered(vf a) { vm r; KT_LANES r.v[i] = a.v[i] != a.v[i]; return r; }
inline vm lane_range(int lo, int hi) { vm r; KT_LANES r.v[i] = i >= lo && i < hi; return r; }
inline vf select(vm m, vf a, vf b) { vf r; KT_LANES r.v[i] = m.v[i] ? a.v[i] : b.v[i]; return r; }

// u[i] = a[i] + a[i + 8], then ((u0 + u1) + (u2 + u3)) + ((u4 + u5) + (u6 + u7)): the order that every tier uses.
inline float reduce_add(vf a) {
  float u[8];
  for (int i = 0; i < 8; ++i) u[i] = a.v[i] + a.v[i + 8];
  return ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
}
inline float reduce_max(vf a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
inline int32_t reduce_maxi(vi a) {
  int32_t best = a.v[0];
  KT_LANES best = a.v[i] > best ? a.v[i] : best;
  return best;
}

inline uint32_t mask_bits(vm m) { uint32_t r = 0; KT_LANES r |= static_cast<uint32_t>(m.v[i]) << i; return r; }

// ---- 8 lanes of fp64 ----
struct vd { double v[8]; };
#define KT_LANES8 for (int i = 0; i < 8; ++i)
inline vd setd(double x) { vd r; KT_LANES8 r.v[i] = x; return r; }
inline vd addd(vd a, vd b) { KT_LANES8 a.v[i] += b.v[i]; return a; }
inline vd subd(vd a, vd b) { KT_LANES8 a.v[i] -= b.v[i]; return a; }
inline vd muld(vd a, vd b) { KT_LANES8 a.v[i] *= b.v[i]; return a; }
inline vd fmad(vd a, vd b, vd c) { KT_LANES8 c.v[i] = __builtin_fma(a.v[i], b.v[i], c.v[i]); return c; }
inline vd maxd(vd a, vd b) { KT_LANES8 a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline void stored(double* p, vd a) { std::memcpy(p, a.v, sizeof a.v); }
// The lanes of a vf, the first 8 and the last 8.
inline void widen(vf x, vd* low, vd* high) { KT_LANES8 low->v[i] = x.v[i], high->v[i] = x.v[i + 8]; }
// x times 2 to the power of the integer in the lowest 12 bits of t.
inline vd add_exponent(vd x, vd t) {
  KT_LANES8 {
    uint64_t value, power;
    std::memcpy(&value, &x.v[i], 8);
    std::memcpy(&power, &t.v[i], 8);
    value += power << 52;
    std::memcpy(&x.v[i], &value, 8);
  }
  return x;
}
// 0 where x is less than `least`.
inline vd keep_from(vd x, vd least) { KT_LANES8 x.v[i] = x.v[i] >= least.v[i] ? x.v[i] : 0.0; return x; }
#undef KT_LANES8

// Values are within [-128, 127].
inline void store_int8(int8_t* p, vi a) { KT_LANES p[i] = static_cast<int8_t>(a.v[i]); }
inline vi load_s8(const uint8_t* p) { vi r; KT_LANES r.v[i] = static_cast<int8_t>(p[i]); return r; }
inline vf load_bf16(const uint8_t* p) {
  vf r;
  KT_LANES {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    const uint32_t u = static_cast<uint32_t>(h) << 16;
    std::memcpy(&r.v[i], &u, 4);
  }
  return r;
}
inline float half_to_float(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  float value;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact
    value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    uint32_t u;
    std::memcpy(&u, &value, 4);
    u |= sign;
    std::memcpy(&value, &u, 4);
    return value;
  }
  uint32_t u = sign | (mantissa << 13);
  if (exponent == 31)
    u |= 0x7f800000u | (mantissa != 0 ? 0x00400000u : 0u);  // NaNs become quiet, as the hardware does it
  else
    u |= (exponent + 112u) << 23;
  std::memcpy(&value, &u, 4);
  return value;
}
inline vf load_f16(const uint8_t* p) { vf r; KT_LANES r.v[i] = half_to_float(p + 2 * i); return r; }
// 16 pairs of FP8 codes: the values / 256 of the first and of the second ones, see fp8.inl.
inline void fp8_pair(const uint8_t* p, vf* first, vf* second) {
  KT_LANES for (int j = 0; j < 2; ++j) {
    const uint8_t code = p[2 * i + j];
    const uint8_t half[2] = {static_cast<uint8_t>(code << 7 & 0x80),
                             static_cast<uint8_t>((code & 0x80) | (code >> 1 & 0x3f))};
    (j == 0 ? first : second)->v[i] = half_to_float(half);
  }
}

// dst[c][r] = src[r][c] for 16 x 16 words of 4 bytes; sources may be unaligned.
inline void transpose16(const uint8_t* const* src, uint8_t* dst) {
  for (int c = 0; c < 16; ++c)
    for (int r = 0; r < 16; ++r) std::memcpy(dst + (c * 16 + r) * 4, src[r] + c * 4, 4);
}

inline void prefetch_line(const uint8_t* p) { __builtin_prefetch(p); }
inline wb load_wb(const uint8_t* p) { wb r; std::memcpy(r.v, p, 64); return r; }
inline void store_wb(uint8_t* p, wb x) { std::memcpy(p, x.v, 64); }
inline void storei(int32_t* p, vi x) { std::memcpy(p, x.v, sizeof x.v); }
inline wb load_signed(const uint8_t* p) { return load_wb(p); }
inline wb or_bytes(wb x, wb y) { for (int i = 0; i < 64; ++i) x.v[i] |= y.v[i]; return x; }
inline wb low_nibbles(wb x) { for (uint8_t& b : x.v) b &= 15; return x; }
inline wb high_nibbles(wb x) { for (uint8_t& b : x.v) b >>= 4; return x; }
// Bits K .. of every byte to bit 4 ..: one bit, or two.
template <int K> inline wb bit_at_4(wb x) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>((b >> K & 1) << 4);
  return x;
}
template <int K> inline wb two_at_4(wb x) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>((b >> K & 3) << 4);
  return x;
}
// Bits FROM .. of every byte, as many as `mask` has, to bit TO ..
template <int FROM, int TO> inline wb move_bits(wb x, int mask) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>((b >> FROM & mask) << TO);
  return x;
}
inline wb add_bytes(wb x, wb y) {
  for (int i = 0; i < 64; ++i) x.v[i] = static_cast<uint8_t>(x.v[i] + y.v[i]);
  return x;
}
// The first of the five digits of base 3 that a byte codes (packed/ternary.inl): 256ths of its triple.
inline wb first_digit(wb x) { for (uint8_t& b : x.v) b = static_cast<uint8_t>(3 * b >> 8); return x; }
// 32 bytes: two int16 in every lane.
inline int32_t pair_lane(int lo, int hi) {
  return static_cast<int32_t>(static_cast<uint16_t>(lo) | (static_cast<uint32_t>(static_cast<uint16_t>(hi)) << 16));
}
inline int lane_low(int32_t x) { return static_cast<int16_t>(x & 0xffff); }
inline int lane_high(int32_t x) { return static_cast<int16_t>(static_cast<uint32_t>(x) >> 16); }
inline vi pairs_u8(const uint8_t* p) { vi r; KT_LANES r.v[i] = pair_lane(p[2 * i], p[2 * i + 1]); return r; }
inline vi pairs_s8(const uint8_t* p) {
  vi r;
  KT_LANES r.v[i] = pair_lane(static_cast<int8_t>(p[2 * i]), static_cast<int8_t>(p[2 * i + 1]));
  return r;
}
inline vi times32(vi x) { KT_LANES x.v[i] = pair_lane(32 * lane_low(x.v[i]), 32 * lane_high(x.v[i])); return x; }
inline vi times4(vi x) { KT_LANES x.v[i] = pair_lane(4 * lane_low(x.v[i]), 4 * lane_high(x.v[i])); return x; }
// The first and the second of the pairs, as flush_scaled wants a scale.
inline vi scale_low(vi x) { KT_LANES x.v[i] = lane_low(x.v[i]); return x; }
inline vi scale_high(vi x) { KT_LANES x.v[i] = lane_high(x.v[i]); return x; }
// The same as int32.
inline vi lane_scale_low(vi x) { return scale_low(x); }
inline vi lane_scale_high(vi x) { return scale_high(x); }
inline vi add_times(vi total, vi x, vi y) { KT_LANES total.v[i] += x.v[i] * y.v[i]; return total; }
// x y modulo 2^32.
inline vi mul_words(vi x, vi y) {
  KT_LANES x.v[i] = static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) * static_cast<uint32_t>(y.v[i]));
  return x;
}
inline vi shr3(vi x) { KT_LANES x.v[i] >>= 3; return x; }  // of numbers that are not negative
inline vi both_halves(vi x) { KT_LANES x.v[i] = pair_lane(x.v[i], x.v[i]); return x; }
// Bytes of every lane times the lane's number, which stands in both halves; products below 256.
inline wb times(wb x, vi m) {
  for (int i = 0; i < 64; ++i) x.v[i] = static_cast<uint8_t>(x.v[i] * lane_low(m.v[i / 4]));
  return x;
}
// Bytes less `offset` times signed numbers: lower and upper byte of the 16-bit products.
inline void split_products(wb x, int offset, vi m, wb* low, wb* high) {
  for (int i = 0; i < 64; ++i) {
    const int product = (x.v[i] - offset) * lane_low(m.v[i / 4]);
    low->v[i] = static_cast<uint8_t>(product & 255);
    high->v[i] = static_cast<uint8_t>(product >> 8);
  }
}
// Bytes 0 .. 15 to what a table of 16 bytes holds for them.
inline wb lookup16(wb x, const uint8_t* table) { for (uint8_t& b : x.v) b = table[b]; return x; }
// ---- for types with a grid, see kernels/packed/grid.inl ----
inline vi lanes_of(wb x) { vi r; std::memcpy(r.v, x.v, 64); return r; }
inline wb xor_bytes(wb x, wb y) { for (int i = 0; i < 64; ++i) x.v[i] ^= y.v[i]; return x; }
// Bits from `shift` on of every byte; the mask ends before bit 8 - shift.
inline wb bits_from(wb x, int shift, int mask) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>(b >> shift & mask);
  return x;
}
// out[i] = low[i] | high[i] << 8
inline void store_pairs_of_bytes(wb low, wb high, uint16_t* out) {
  for (int i = 0; i < 64; ++i) out[i] = static_cast<uint16_t>(low.v[i] | high.v[i] << 8);
}
// The words of both with even, and with odd numbers.
inline void split_pairs(wb x, wb y, wb* even, wb* odd) {
  wb words[2];
  for (int i = 0; i < 32; ++i) std::memcpy(words[i % 2].v + i / 2 * 4, (i < 16 ? x : y).v + i % 16 * 4, 4);
  *even = words[0];
  *odd = words[1];
}
// Byte J of every word in all four of its bytes.
template <int J> inline wb spread_byte(wb x) {
  wb r;
  for (int i = 0; i < 64; ++i) r.v[i] = x.v[i / 4 * 4 + J];
  return r;
}
// Byte c of every word, less than 128, negative where bit BIT + c of `signs` is set; then with bits `FLIP` flipped.
template <int BIT, uint8_t FLIP> inline wb negate_bytes(wb x, wb signs) {
  for (int i = 0; i < 64; ++i) {
    const int value = signs.v[i] >> (BIT + i % 4) & 1 ? -x.v[i] : x.v[i];
    x.v[i] = static_cast<uint8_t>(static_cast<uint8_t>(value) ^ FLIP);
  }
  return x;
}
inline uacc uacc_zero() { return uacc{}; }
inline void pair_sums32(const int8_t*, int16_t*) {}            // for narrow sums
inline uacc uacc_pair(const int16_t*) { return uacc{}; }  // for narrow sums
inline uacc udot(uacc acc, wb w, const int8_t* y) {
  KT_LANES for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * y[j];
  return acc;
}
inline vi flush_scaled(vi total, uacc acc, vi scale) { KT_LANES total.v[i] += acc.v[i] * scale.v[i]; return total; }
inline vi flush(vi total, uacc acc) { return addi(total, acc); }
inline int32_t scale_lane(int scale) { return scale; }
inline vi sdot_init(int) { return vi{}; }
inline vi sdot(vi acc, wb w, const int8_t* y) {
  KT_LANES for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(static_cast<int8_t>(w.v[4 * i + j])) * y[j];
  return acc;
}

// ---- what simd/x86.h gives the other tiers ----

struct vb { uint8_t v[32]; };
using vp = int32_t;
struct vs { int16_t v[16]; };  // scale of each 16 weights of a super-block

#define KT_BYTES for (int i = 0; i < 32; ++i)
inline vb loadb(const uint8_t* p) { vb r; std::memcpy(r.v, p, 32); return r; }
inline void storeb(uint8_t* p, vb x) { std::memcpy(p, x.v, 32); }
inline vb andb(vb x, int mask) { KT_BYTES x.v[i] = static_cast<uint8_t>(x.v[i] & mask); return x; }
inline vb orb(vb x, vb y) { KT_BYTES x.v[i] = static_cast<uint8_t>(x.v[i] | y.v[i]); return x; }
template <int N> inline vb shr_mask(vb x, int mask) {
  KT_BYTES x.v[i] = static_cast<uint8_t>((x.v[i] >> N) & mask);
  return x;
}
template <int N> inline vb mask_shl(vb x, int mask) {
  KT_BYTES x.v[i] = static_cast<uint8_t>((x.v[i] & mask) << N);
  return x;
}
inline vb nibbles16(const uint8_t* p) {
  vb r;
  for (int i = 0; i < 16; ++i) {
    r.v[i] = p[i] & 15;
    r.v[16 + i] = p[i] >> 4;
  }
  return r;
}
inline vp zerop() { return 0; }
inline vp dot_u8(vb w, const int8_t* y) { vp sum = 0; KT_BYTES sum += static_cast<int32_t>(w.v[i]) * y[i]; return sum; }
inline vp dot_s8(const uint8_t* w, const int8_t* y) {
  vp sum = 0;
  KT_BYTES sum += static_cast<int32_t>(static_cast<int8_t>(w[i])) * y[i];
  return sum;
}
inline vs scales8(const uint8_t* sc) { vs r; for (int i = 0; i < 16; ++i) r.v[i] = sc[i / 2]; return r; }
inline vs scales16(const uint8_t* sc) { vs r; KT_LANES r.v[i] = static_cast<int8_t>(sc[i]); return r; }
template <int S> inline vp add_scaled(vp acc, vb w, const int8_t* y, vs scales) {
  KT_BYTES acc += static_cast<int32_t>(w.v[i]) * y[i] * scales.v[2 * S + i / 16];
  return acc;
}
inline vp dot_mins8(const uint8_t* m, const int16_t* sums) {
  vp r = 0;
  for (int i = 0; i < 8; ++i) r += m[i] * sums[i];
  return r;
}
inline vp dot_mins16(const uint8_t* m, const int16_t* sums) {
  vp r = 0;
  for (int i = 0; i < 16; ++i) r += static_cast<int8_t>(m[i]) * sums[i];
  return r;
}
inline vi reduce_rows(const vp* p) { return loadi(p); }
#undef KT_BYTES

struct v8 { float v[8]; };

inline v8 zero8() { return v8{}; }
inline v8 load8(const float* p) { v8 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store8(float* p, v8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline v8 load8_n(const float* p, int n) { v8 r{}; std::memcpy(r.v, p, sizeof *p * static_cast<size_t>(n)); return r; }
inline v8 fma8(v8 x, v8 y, v8 z) {
  for (int i = 0; i < 8; ++i) z.v[i] = __builtin_fmaf(x.v[i], y.v[i], z.v[i]);
  return z;
}
template <QType TYPE> inline v8 load_weights8(const uint8_t* p) {
  v8 r;
  for (int i = 0; i < 8; ++i) {
    if constexpr (TYPE == QType::F16) {
      r.v[i] = half_to_float(p + 2 * i);
    } else {
      uint32_t u = 0;
      std::memcpy(&u, p + i * (TYPE == QType::F32 ? 4 : 2), TYPE == QType::F32 ? 4 : 2);
      if (TYPE == QType::BF16) u <<= 16;
      std::memcpy(&r.v[i], &u, 4);
    }
  }
  return r;
}
inline float tree_sum(const float* u) { return ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7])); }
// acc[r] += tree sum of s[r], 8 of them.
inline void reduce8_add(const v8* s, float* acc) {
  for (int r = 0; r < 8; ++r) acc[r] = acc[r] + tree_sum(s[r].v);
}
// Where row r, column c of a stage of 8 rows lies.
inline int stage_at(int r, int c) { return r * kFloatCols + c; }
// s[c * 8 + r] = the 8 sums of w[r] . x[c] for the 8 rows of a stage and C vectors.
template <int C> inline void dot_rows8(const float* w, const float* const* x, int cols, v8* s) {
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < 8; ++r) {
      v8 sum = zero8();
      for (int k = 0; k < cols; k += 8)
        sum = fma8(load8(w + stage_at(r, k)), load8_n(x[c] + k, cols - k < 8 ? cols - k : 8), sum);
      s[c * 8 + r] = sum;
    }
}
// 16 words of 16 rows to dst[word][row]: an F32 column at a time.
inline void store_columns16(const uint8_t* const* rows, int64_t at, float* dst) {
  const uint8_t* src[16];
  for (int r = 0; r < 16; ++r) src[r] = rows[r] + at;
  transpose16(src, reinterpret_cast<uint8_t*>(dst));
}

// total += a[lane][0] * y[0] + a[lane][1] * y[1], int16 pairs.
inline vi pair_dot(vi total, vi a, const int16_t* y) {
  KT_LANES {
    const int16_t lo = static_cast<int16_t>(a.v[i] & 0xffff), hi = static_cast<int16_t>(a.v[i] >> 16);
    total.v[i] += lo * y[0] + hi * y[1];
  }
  return total;
}

#undef KT_BINARY
#undef KT_LANES

}  // namespace
