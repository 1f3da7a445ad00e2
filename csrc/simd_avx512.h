// The AVX-512 (F, BW, VL, DQ, VNNI) SIMD layer: 16 lanes are one register.
// Included once, by tier_avx512.cpp. See simd_scalar.h for what each name means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_x86.h"

namespace {

constexpr bool kNarrowSums = false;
constexpr uint8_t kSignFlip = 0x80;  // vpdpbusd wants unsigned weights: Q8_0 is staged as q + 128, see sdot_init
constexpr int kFloatTokens = 12, kQuantTokens = 8;

struct vf { __m512 v; };
struct vi { __m512i v; };
struct vm { __mmask16 m; };
struct wb { __m512i v; };
using uacc = vi;

inline __mmask16 lanes_below(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u); }
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
inline void storei(int32_t* p, vi x) { _mm512_storeu_si512(p, x.v); }
inline vi set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline vi addi(vi x, vi y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline vi subi(vi x, vi y) { return {_mm512_sub_epi32(x.v, y.v)}; }
inline vi andi(vi x, vi y) { return {_mm512_and_si512(x.v, y.v)}; }
inline vi ori(vi x, vi y) { return {_mm512_or_si512(x.v, y.v)}; }
inline vi maxi(vi x, vi y) { return {_mm512_max_epi32(x.v, y.v)}; }
template <int N> inline vi shl(vi x) { return {_mm512_slli_epi32(x.v, N)}; }
inline vf to_float(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline vi to_int(vf x) { return {_mm512_cvtps_epi32(x.v)}; }
inline vi bits(vf x) { return {_mm512_castps_si512(x.v)}; }
inline vf from_bits(vi x) { return {_mm512_castsi512_ps(x.v)}; }

inline vm less(vf x, vf y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ)}; }
inline vm unordered(vf x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
inline vm lane_range(int lo, int hi) { return {static_cast<__mmask16>(lanes_below(hi) & ~lanes_below(lo))}; }
inline vf select(vm m, vf x, vf y) { return {_mm512_mask_blend_ps(m.m, y.v, x.v)}; }

inline float reduce_add(vf x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(vf x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t reduce_maxi(vi x) { return _mm512_reduce_max_epi32(x.v); }
inline int32_t reduce_addi(vi x) { return _mm512_reduce_add_epi32(x.v); }

inline void store_int8(int8_t* p, vi x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v)); }
inline vf load_bf16(const uint8_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline vf load_f16(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

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
inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
inline uacc uacc_zero() { return {_mm512_setzero_si512()}; }
inline uacc udot(uacc acc, wb w, const int8_t* y) { return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(y))}; }
inline vi flush_scaled(vi total, uacc acc, vi scale) {
  return {_mm512_add_epi32(total.v, _mm512_mullo_epi32(acc.v, scale.v))};
}
inline vi flush(vi total, uacc acc) { return addi(total, acc); }
inline int32_t scale_lane(int scale) { return scale; }
// The weights are staged as q + 128, so the sum starts at -128 times the sum of the block's activations.
inline vi sdot_init(int sum) { return set1i(-128 * sum); }
inline vi sdot(vi acc, wb w, const int8_t* y) { return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(y))}; }
inline vi reduce_rows(const vp* p) { return {_mm512_inserti64x4(_mm512_castsi256_si512(reduce8(p)), reduce8(p + 8), 1)}; }

// 16 bytes of rows i, i + 4, i + 8, i + 12, one in each 128-bit quarter.
inline __m512i join4(const uint8_t* const* rows, int i, int64_t at) {
  const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + at)); };
  __m512i v = _mm512_castsi128_si512(part(i));
  v = _mm512_inserti32x4(v, part(i + 4), 1);
  v = _mm512_inserti32x4(v, part(i + 8), 2);
  return _mm512_inserti32x4(v, part(i + 12), 3);
}
// Columns of 16 rows of unquantized weights at byte offset `at`: r[c] holds column c.
template <QType TYPE> inline void columns8(const uint8_t* const* rows, int64_t at, __m512* r) {
  if constexpr (TYPE == QType::F16) {
    __m256 lo[8], hi[8];
    for (int i = 0; i < 8; ++i) {
      lo[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at)));
      hi[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 8] + at)));
    }
    transpose8x8(lo);
    transpose8x8(hi);
    for (int i = 0; i < 8; ++i) r[i] = _mm512_insertf32x8(_mm512_castps256_ps512(lo[i]), hi[i], 1);
  } else if constexpr (TYPE == QType::BF16) {
    // Transposed as 16-bit words; the last step puts a zero word below each.
    __m512i t[4], u[4];
    for (int i = 0; i < 4; ++i) t[i] = join4(rows, i, at);
    u[0] = _mm512_unpacklo_epi16(t[0], t[1]);
    u[1] = _mm512_unpackhi_epi16(t[0], t[1]);
    u[2] = _mm512_unpacklo_epi16(t[2], t[3]);
    u[3] = _mm512_unpackhi_epi16(t[2], t[3]);
    for (int i = 0; i < 2; ++i) {
      t[2 * i] = _mm512_unpacklo_epi32(u[i], u[i + 2]);
      t[2 * i + 1] = _mm512_unpackhi_epi32(u[i], u[i + 2]);
    }
    for (int i = 0; i < 4; ++i) {
      r[2 * i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), t[i]));
      r[2 * i + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), t[i]));
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      __m512 t[4], u[4];
      for (int i = 0; i < 4; ++i) t[i] = _mm512_castsi512_ps(join4(rows, i, at + 16 * half));
      for (int i = 0; i < 2; ++i) {
        u[2 * i] = _mm512_unpacklo_ps(t[2 * i], t[2 * i + 1]);
        u[2 * i + 1] = _mm512_unpackhi_ps(t[2 * i], t[2 * i + 1]);
      }
      r[4 * half] = _mm512_shuffle_ps(u[0], u[2], 0x44);
      r[4 * half + 1] = _mm512_shuffle_ps(u[0], u[2], 0xee);
      r[4 * half + 2] = _mm512_shuffle_ps(u[1], u[3], 0x44);
      r[4 * half + 3] = _mm512_shuffle_ps(u[1], u[3], 0xee);
    }
  }
}
// 8 columns of 16 rows to dst[column][row].
template <QType TYPE> inline void store_columns8(const uint8_t* const* rows, int64_t at, float* dst) {
  __m512 r[8];
  columns8<TYPE>(rows, at, r);
  for (int c = 0; c < 8; ++c) _mm512_storeu_ps(dst + 16 * c, r[c]);
}
// s[c] = fma(column, x[c][column], s[c]) for 16 columns, ascending.
template <QType TYPE, int C> inline void fma_columns16(const uint8_t* const* rows, int64_t at, const float* const* x, int64_t k, vf* s) {
  constexpr int bytes = TYPE == QType::F32 ? 4 : 2;
  __m512 r[8];
  for (int j = 0; j < 16; ++j) {
    if (j % 8 == 0) columns8<TYPE>(rows, at + j * bytes, r);
    for (int c = 0; c < C; ++c) s[c].v = _mm512_fmadd_ps(r[j % 8], _mm512_set1_ps(x[c][k + j]), s[c].v);
  }
}

inline vi pair_dot(vi total, vi a, const int16_t* y) { return {_mm512_dpwssd_epi32(total.v, a.v, broadcast4(y))}; }

}  // namespace
