// ggml's block formats: unpacking, dequantizing, and quantizing activations to int8.
// Included by a tier file after its SIMD layer. Layouts are those of ggml-quants.h / gguf.quants:
//   Q8_0  34 B / 32:  half d; int8 q[32]                                          w = d q
//   Q4_0  18 B / 32:  half d; nibbles qs[16] (low: 0-15, high: 16-31)             w = d (q - 8)
//   Q4_K 144 B / 256: half d, dmin; 6-bit sc[8], m[8] in 12 B; nibbles qs[128]    w = d sc q - dmin m
//   Q5_K 176 B / 256: the same, with a fifth bit in qh[32] before qs              w = d sc q - dmin m
//   Q6_K 210 B / 256: ql[128]; qh[64]; int8 sc[16]; half d                        w = d sc (q - 32)
//  MXFP4  17 B / 32:  e8m0 exponent e; nibbles qs[16] as in Q4_0                    w = 2^(e - 128) table[q]
// Blocks are read at any alignment and never past their end. Weights in groups: packed/groups.inl;
// IQ4_XS: packed/signed.inl, types of ik_llama.cpp: packed/iqk.inl.

namespace {

struct KScales { uint8_t sc[8], m[8]; };

// 8 six-bit scales and 8 six-bit minima from 12 bytes, four at a time in 32-bit words.
inline KScales unpack_scales(const uint8_t* p) {
  uint32_t in[3], sc[2], m[2];
  std::memcpy(in, p, 12);
  sc[0] = in[0] & 0x3f3f3f3fu;
  m[0] = in[1] & 0x3f3f3f3fu;
  sc[1] = (in[2] & 0x0f0f0f0fu) | ((in[0] >> 2) & 0x30303030u);
  m[1] = ((in[2] >> 4) & 0x0f0f0f0fu) | ((in[1] >> 2) & 0x30303030u);
  KScales s;
  std::memcpy(s.sc, sc, 8);
  std::memcpy(s.m, m, 8);
  return s;
}

// The formats of 256: chunk<S> gives weights 32 S .. 32 S + 31 as unsigned bytes.
struct FormatQ4K {
  static constexpr int bytes = 144, subs = 8, narrow_steps = 8;  // 8 * 2 * 15 * 127 fits in an int16
  static constexpr bool has_min = true;
  template <int S> static vb chunk(const uint8_t* p) {
    const vb x = loadb(p + 16 + 32 * (S / 2));
    return S % 2 == 0 ? andb(x, 15) : shr_mask<4>(x, 15);
  }
};
struct FormatQ5K {
  static constexpr int bytes = 176, subs = 8, narrow_steps = 4;  // 4 * 2 * 31 * 127
  static constexpr bool has_min = true;
  template <int S> static vb chunk(const uint8_t* p) {
    const vb x = loadb(p + 48 + 32 * (S / 2)), high = loadb(p + 16);
    const vb low = S % 2 == 0 ? andb(x, 15) : shr_mask<4>(x, 15);
    if constexpr (S < 4) return orb(low, mask_shl<4 - S>(high, 1 << S));
    return orb(low, shr_mask<(S < 4 ? 0 : S - 4)>(high, 16));
  }
};
struct FormatQ6K {
  static constexpr int bytes = 210, subs = 16, d_at = 208;  // narrow sums are centred, see gemm.inl
  static constexpr bool has_min = false;
  template <int S> static vb chunk(const uint8_t* p) {
    constexpr int part = S % 4;
    const vb x = loadb(p + 64 * (S / 4) + 32 * (part % 2)), high = loadb(p + 128 + 32 * (S / 4));
    const vb low = part < 2 ? andb(x, 15) : shr_mask<4>(x, 15);
    if constexpr (part < 2) return orb(low, mask_shl<4 - 2 * (part < 2 ? part : 0)>(high, 3 << (2 * part)));
    if constexpr (part == 2) return orb(low, andb(high, 48));
    return orb(low, shr_mask<2>(high, 48));
  }
};

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 2^(e - 128): the table holds twice the values of the format.
inline float half_of_e8m0(uint8_t e) {
  const uint32_t bits = e < 2 ? uint32_t{0x00200000} << e : static_cast<uint32_t>(e - 1) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class F> inline void unpack256(const uint8_t* p, uint8_t* q) {
  storeb(q, F::template chunk<0>(p));
  storeb(q + 32, F::template chunk<1>(p));
  storeb(q + 64, F::template chunk<2>(p));
  storeb(q + 96, F::template chunk<3>(p));
  storeb(q + 128, F::template chunk<4>(p));
  storeb(q + 160, F::template chunk<5>(p));
  storeb(q + 192, F::template chunk<6>(p));
  storeb(q + 224, F::template chunk<7>(p));
}

// Sequence of operations of gguf.quants.dequantize, so that results are equal bit for bit.
template <> struct Dequantizer<QType::Q6_K> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    unpack256<FormatQ6K>(p, q);
    const float d = half_to_float(p + 208);
    for (int s = 0; s < 16; ++s) {
      const float ds = d * static_cast<float>(static_cast<int8_t>(p[192 + s]));
      for (int i = 0; i < 16; ++i) out[16 * s + i] = ds * static_cast<float>(static_cast<int>(q[16 * s + i]) - 32);
    }
  }
};

// Q4_K and Q5_K.
template <class F> inline void dequantize_minimum(const uint8_t* p, float* out) {
  uint8_t q[256];
  unpack256<F>(p, q);
  const float d = half_to_float(p), dmin = half_to_float(p + 2);
  const KScales ks = unpack_scales(p + 4);
  for (int s = 0; s < 8; ++s) {
    const float ds = d * static_cast<float>(ks.sc[s]), dm = dmin * static_cast<float>(ks.m[s]);
    for (int i = 0; i < 32; ++i) out[32 * s + i] = ds * static_cast<float>(q[32 * s + i]) - dm;
  }
}

// 16 elements of an unquantized row as fp32.
template <QType TYPE> inline vf load_weights(const uint8_t* p) {
  if constexpr (TYPE == QType::F16) return load_f16(p);
  if constexpr (TYPE == QType::BF16) return load_bf16(p);
  return load(reinterpret_cast<const float*>(p));
}

// The last n < 16 elements, without touching the bytes behind them; other lanes are 0.
template <QType TYPE> inline vf load_weights_n(const uint8_t* p, int n) {
  alignas(64) uint8_t copy[64] = {};
  std::memcpy(copy, p, static_cast<size_t>(n) * (TYPE == QType::F32 ? 4 : 2));
  return load_weights<TYPE>(copy);
}

template <QType TYPE> void dequantize_float(const uint8_t* row, int64_t k, float* out) {
  constexpr int bytes = TYPE == QType::F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) store(out + i, load_weights<TYPE>(row + i * bytes));
  const int rest = static_cast<int>(k - i);
  if (rest > 0) store_n(out + i, load_weights_n<TYPE>(row + i * bytes, rest), rest);
}

template <> struct Dequantizer<QType::Q8_0> {
  static void block(const uint8_t* p, float* out) {
    const float d = half_to_float(p);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(p[2 + i])) * d;
  }
};
template <> struct Dequantizer<QType::Q4_0> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[32];
    storeb(q, nibbles16(p + 2));
    const float d = half_to_float(p);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int>(q[i]) - 8);
  }
};
template <> struct Dequantizer<QType::MXFP4> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[32];
    storeb(q, nibbles16(p + 1));
    const float d = half_of_e8m0(p[0]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(kMxfp4Values[q[i]]);
  }
};
template <> struct Dequantizer<QType::Q4_K> {
  static void block(const uint8_t* p, float* out) { dequantize_minimum<FormatQ4K>(p, out); }
};
template <> struct Dequantizer<QType::Q5_K> {
  static void block(const uint8_t* p, float* out) { dequantize_minimum<FormatQ5K>(p, out); }
};

// One block of activations: d = max|x| / 127, q = round_half_even(x * (127 / max|x|)).
//   max|x| below 1e-30 (zeros included): d = 0 and q = 0, for 127 / max|x| would overflow.
//   any NaN or infinity: d = NaN and q = 0, so that every output that uses the block is NaN.
template <int N> inline float quantize_block(const float* x, int8_t* q) {
  vi best = set1i(0);
  for (int i = 0; i < N; i += 16) best = maxi(best, andi(bits(load(x + i)), set1i(0x7fffffff)));
  const int32_t max_bits = reduce_maxi(best);  // the order of magnitudes is the order of their bits; NaN is the largest
  float amax;
  std::memcpy(&amax, &max_bits, 4);
  const bool finite = max_bits < 0x7f800000;
  if (!finite || amax < 1e-30f) {
    std::memset(q, 0, N);
    return finite ? 0.0f : __builtin_nanf("");
  }
  const vf inverse = set1(127.0f / amax);
  for (int i = 0; i < N; i += 16) store_int8(q + i, to_int(mul(load(x + i), inverse)));
  return amax / 127.0f;
}

inline int sum_int8(const int8_t* q, int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += q[i];
  return sum;
}

void quantize_row(ActForm form, const float* x, int64_t k, int8_t* q, float* d, int16_t* sums) {
  if (form == ActForm::Q32) {
    for (int64_t b = 0; b < k / 32; ++b) {
      d[b] = quantize_block<32>(x + 32 * b, q + 32 * b);
      const int first = sum_int8(q + 32 * b, 16);
      sums[kSumsPerBlock * b] = static_cast<int16_t>(first + sum_int8(q + 32 * b + 16, 16));
      sums[kSumsPerBlock * b + 1] = static_cast<int16_t>(first);
    }
    return;
  }
  for (int64_t b = 0; b < k / 256; ++b) {
    const int8_t* block = q + 256 * b;
    int16_t* s = sums + kSumsPerSuper * b;
    d[b] = quantize_block<256>(x + 256 * b, q + 256 * b);
    for (int j = 0; j < 16; ++j) s[j] = static_cast<int16_t>(sum_int8(block + 16 * j, 16));
    for (int j = 0; j < 8; ++j) s[16 + j] = static_cast<int16_t>(s[2 * j] + s[2 * j + 1]);
    if constexpr (kNarrowSums)
      for (int j = 0; j < 8; ++j) pair_sums32(block + 32 * j, s + kPairSums + 4 * j);
  }
}

}  // namespace
