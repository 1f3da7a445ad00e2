// What the two x86 tiers share, in 256-bit registers: bytes of quantized blocks, and dot products along one row.
// Included by simd/avx2.h and simd/avx512.h; each tier compiles its own copy.
//   vb   32 bytes of a block          vp   partial sums of one row: their total is the dot product
//   vs   the int16 scales of a super-block, arranged for add_scaled
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "runtime/types.h"

namespace {

using namespace kt;

using vb = __m256i;
using vp = __m256i;
using vs = __m256i;

// Compilers may reorder __builtin_prefetch. Zen 3 reads Q6_K with 20 instead of 14 GB/s a core when lines are asked for
// in ascending order.
inline void prefetch_line(const uint8_t* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }

// While one lives, subnormal operands and results of fp32 count as zeros, as they do in products of bf16. Kernels that
// count on it are not inlined where it is made, for compilers move arithmetic past changes of the mode.
class FlushSubnormals {
 public:
  FlushSubnormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040u); }  // FTZ, DAZ
  ~FlushSubnormals() { _mm_setcsr(mode_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned mode_;
};
// What arithmetic gives under FlushSubnormals.
template <class T> inline T flushed(T x) { return x; }

inline vb loadb(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void storeb(uint8_t* p, vb x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline vb andb(vb x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
inline vb orb(vb x, vb y) { return _mm256_or_si256(x, y); }
// (x >> N) & mask and (x & mask) << N for every byte; the mask leaves no bit that would cross into a neighbour.
template <int N> inline vb shr_mask(vb x, int mask) { return andb(_mm256_srli_epi16(x, N), mask); }
template <int N> inline vb mask_shl(vb x, int mask) { return _mm256_slli_epi16(andb(x, mask), N); }
// 16 bytes to 32 nibbles, the low ones first.
inline vb nibbles16(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return andb(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), 15);
}

inline float half_to_float(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}

inline __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Whether products of bytes are summed in int32 as they are made (VNNI). KT_EMULATED_VNNI: the same with AVX2, slow.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(KT_EMULATED_VNNI)
#define KT_VNNI
#endif

#if defined(KT_VNNI)
// acc + u8 . s8 of four bytes, and + s16 . s16 of two, in every lane.
#if defined(__AVX512VNNI__)
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_epi32(acc, u, s); }
inline vp madd_add(vp acc, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(acc, a, b); }
#elif defined(__AVXVNNI__)
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
inline vp madd_add(vp acc, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
#else
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) {
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline vp madd_add(vp acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif
inline vp dot_u8(vb w, const int8_t* y) { return add_products(_mm256_setzero_si256(), w, load32(y)); }
// (q + 128) . y: the caller subtracts 128 times the sum of y (kSignFlip).
inline vp dot_s8(const uint8_t* w, const int8_t* y) {
  return dot_u8(_mm256_xor_si256(loadb(w), _mm256_set1_epi8(static_cast<char>(0x80))), y);
}
#else
inline vp dot_u8(vb w, const int8_t* y) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, load32(y)), _mm256_set1_epi16(1));
}
// maddubs wants an unsigned factor: |w| * (y with the sign of w). |y| <= 127, so that no sum of two saturates.
inline vp dot_s8(const uint8_t* p, const int8_t* y) {
  const __m256i w = loadb(p);
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(load32(y), w)),
                           _mm256_set1_epi16(1));
}
inline vp madd_add(vp acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif

inline vp zerop() { return _mm256_setzero_si256(); }

// 8 unsigned scales of sub-blocks of 32: all 8 in both 128-bit halves.
inline vs scales8(const uint8_t* sc) {
  return _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(sc))));
}
// 16 signed scales of sub-blocks of 16: the even ones in the low half, the odd ones in the high half.
inline vs scales16(const uint8_t* sc) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sc)), order));
}
// acc + (32 weights of chunk S) . y, times the scale (or two scales) of the chunk.
template <int S> inline vp add_scaled(vp acc, vb w, const int8_t* y, vs scales) {
  const __m256i pattern = _mm256_set1_epi16(static_cast<int16_t>((2 * S) | ((2 * S + 1) << 8)));
  return madd_add(acc, _mm256_maddubs_epi16(w, load32(y)), _mm256_shuffle_epi8(scales, pattern));
}
// sum_s m[s] * sums[s] over 8 unsigned, and over 16 signed numbers.
inline vp dot_mins8(const uint8_t* m, const int16_t* sums) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(m)));
  return _mm256_zextsi128_si256(_mm_madd_epi16(wide, _mm_loadu_si128(reinterpret_cast<const __m128i*>(sums))));
}
inline vp dot_mins16(const uint8_t* m, const int16_t* sums) {
  return _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(m))), load32(sums));
}

// Totals of 8 rows.
inline __m256i reduce8(const vp* p) {
  const __m256i lo = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
  const __m256i hi = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(lo, hi, 0x20), _mm256_permute2x128_si256(lo, hi, 0x31));
}

// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of 8 registers.
inline __m256 reduce8f(const __m256* p) {
  const __m256 lo = _mm256_hadd_ps(_mm256_hadd_ps(p[0], p[1]), _mm256_hadd_ps(p[2], p[3]));
  const __m256 hi = _mm256_hadd_ps(_mm256_hadd_ps(p[4], p[5]), _mm256_hadd_ps(p[6], p[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31));
}
inline float reduce8f(__m256 x) {
  x = _mm256_hadd_ps(x, x);
  x = _mm256_hadd_ps(x, x);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// ---- 8 columns of unquantized weights ----

using v8 = __m256;

inline v8 zero8() { return _mm256_setzero_ps(); }
inline v8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, v8 x) { _mm256_storeu_ps(p, x); }
inline v8 load8_n(const float* p, int n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
}
inline v8 fma8(v8 x, v8 y, v8 z) { return _mm256_fmadd_ps(x, y, z); }
template <QType TYPE> inline v8 load_weights8(const uint8_t* p) {
  if constexpr (TYPE == QType::F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (TYPE == QType::F16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
// acc[r] += tree sum of s[r], 8 of them.
inline void reduce8_add(const v8* s, float* acc) {
  _mm256_storeu_ps(acc, _mm256_add_ps(_mm256_loadu_ps(acc), reduce8f(s)));
}

inline void transpose8x8(__m256* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    const __m256 lo = r[i], hi = r[i + 4];
    r[i] = _mm256_permute2f128_ps(lo, hi, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(lo, hi, 0x31);
  }
}

}  // namespace
