// More of ggml's block formats: those of a scale, perhaps an offset, and codes of at most 5 bits.
// Included by a tier file after quant.inl. Layouts are those of ggml-quants.h / gguf.quants:
//   Q4_1  20 B / 32:  half d, m; nibbles qs[16] as in Q4_0                            w = d q + m
//   Q5_0  22 B / 32:  half d; fifth bits qh[4]; nibbles qs[16]                        w = d (q - 16)
//   Q5_1  24 B / 32:  half d, m; qh[4]; qs[16]                                        w = d q + m
// IQ4_NL  18 B / 32:  half d; nibbles qs[16]                                          w = d table[q]
//  NVFP4  36 B / 64:  UE4M3 e[4]; nibbles of 16 columns in 8 B, four times            w = e / 2 table[q]
//   Q2_K  84 B / 256: sc[16] (scale, then minimum in the upper nibble); qs[64]; half d, dmin
//                                                                                     w = d sc q - dmin m
//   Q3_K 110 B / 256: third bits hmask[32]; qs[64]; 6-bit sc[16] in 12 B; half d      w = d (sc - 32) (q - 4)
//  TQ1_0  54 B / 256: five digits of base 3 a byte, qs[48]; four, qh[4]; half d       w = d (q - 1)
//  TQ2_0  66 B / 256: qs[64]; half d                                                  w = d (q - 1)
//   Q1_0  18 B / 128: half d; a bit a weight, qs[16], from the lowest up              w = d (2 q - 1)
// They are computed with in packed form: packed/k2k3.inl, packed/small.inl, packed/ternary.inl.

namespace {

struct FormatQ2K {
  static constexpr int bytes = 84, subs = 16, narrow_steps = 4;
  static constexpr bool has_min = true;
  template <int S> static vb chunk(const uint8_t* p) { return shr_mask<2 * (S % 4)>(loadb(p + 16 + 32 * (S / 4)), 3); }
};
struct FormatQ3K {
  static constexpr int bytes = 110, subs = 16;
  static constexpr bool has_min = false;
  template <int S> static vb chunk(const uint8_t* p) {
    const vb low = shr_mask<2 * (S % 4)>(loadb(p + 32 + 32 * (S / 4)), 3), high = loadb(p);
    if constexpr (S < 2) return orb(low, mask_shl<(S < 2 ? 2 - S : 0)>(high, 1 << S));
    return orb(low, shr_mask<(S < 2 ? 0 : S - 2)>(high, 4));
  }
};
struct FormatTQ2 {
  static constexpr int bytes = 66, subs = 8, d_at = 64;
  static constexpr bool has_min = false;
  template <int S> static vb chunk(const uint8_t* p) { return shr_mask<2 * (S % 4)>(loadb(p + 32 * (S / 4)), 3); }
  static void codes(const uint8_t* p, uint8_t* q) { unpack256<FormatTQ2>(p, q); }
};
struct FormatTQ1 {
  static constexpr int bytes = 54, subs = 8, d_at = 52;
  static constexpr bool has_min = false;

  // `digits` digits of each of N bytes, the first ones of all before the second ones.
  template <int N> static void expand(const uint8_t* p, int digits, uint8_t* q) {
    uint8_t left[N];
    std::memcpy(left, p, N);
    for (int n = 0; n < digits; ++n)
      for (int i = 0; i < N; ++i) {
        q[N * n + i] = static_cast<uint8_t>(3 * left[i] >> 8);
        left[i] = static_cast<uint8_t>(3 * left[i]);
      }
  }
  static void codes(const uint8_t* p, uint8_t* q) {
    expand<32>(p, 5, q);
    expand<16>(p + 32, 5, q + 160);
    expand<4>(p + 48, 4, q + 240);
  }
};

// 16 scales of Q3_K, from -32 to 31.
inline void unpack_q3_scales(const uint8_t* p, int8_t* scales) {
  for (int s = 0; s < 16; ++s) {
    const int low = s < 8 ? p[s] & 15 : p[s - 8] >> 4;
    scales[s] = static_cast<int8_t>((low | (p[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32);
  }
}

// Codes of 32 weights from 16 bytes of nibbles, and of four bytes of fifth bits.
inline void nibble_codes(const uint8_t* p, uint8_t* q) { storeb(q, nibbles16(p)); }
inline void add_fifth_bits(const uint8_t* p, uint8_t* q) {
  uint32_t upper;
  std::memcpy(&upper, p, 4);
  for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(q[i] | (upper >> i & 1) << 4);
}
// Half h (0 or 1) of a block of NVFP4: two groups of 16.
inline void nvfp4_codes(const uint8_t* p, int64_t h, uint8_t* q) {
  for (int s = 0; s < 2; ++s)
    for (int i = 0; i < 8; ++i) {
      const uint8_t pair = p[4 + 16 * h + 8 * s + i];
      q[16 * s + i] = pair & 15;
      q[16 * s + 8 + i] = pair >> 4;
    }
}

// Half of the number that 7 bits of UE4M3 code, exact.
inline float half_of_ue4m3(uint8_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 20;  // its exponent has the bias 7 instead of 127
  float value;
  std::memcpy(&value, &bits, 4);
  return value * 0x1p119f;
}
// A scale of NVFP4 as such a code. In the file the upper bit does not count, and 127 is no number: it counts as 0.
inline uint8_t nvfp4_scale(uint8_t stored) { return stored == 127 ? 0 : stored & 127; }

// The following ones follow the sequence of operations of gguf.quants, so that results are equal bit for bit.
template <bool MIN, bool FIFTH> struct AffineDequantizer {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[32];
    nibble_codes(p + 2 + 2 * MIN + 4 * FIFTH, q);
    if (FIFTH) add_fifth_bits(p + 2 + 2 * MIN, q);
    const float d = half_to_float(p), m = MIN ? half_to_float(p + 2) : 0.0f;
    for (int i = 0; i < 32; ++i) {
      const float product = d * static_cast<float>(MIN ? q[i] : q[i] - 16);
      out[i] = MIN ? product + m : product;
    }
  }
};
template <> struct Dequantizer<QType::Q4_1> : AffineDequantizer<true, false> {};
template <> struct Dequantizer<QType::Q5_0> : AffineDequantizer<false, true> {};
template <> struct Dequantizer<QType::Q5_1> : AffineDequantizer<true, true> {};

template <> struct Dequantizer<QType::IQ4_NL> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[32];
    nibble_codes(p + 2, q);
    const float d = half_to_float(p);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(kIq4Values[q[i]]);
  }
};

template <> struct Dequantizer<QType::NVFP4> {
  static void block(const uint8_t* p, float* out) {
    for (int h = 0; h < 2; ++h) {
      uint8_t q[32];
      nvfp4_codes(p, h, q);
      for (int i = 0; i < 32; ++i)
        out[32 * h + i] = half_of_ue4m3(nvfp4_scale(p[2 * h + i / 16])) * static_cast<float>(kMxfp4Values[q[i]]);
    }
  }
};

template <> struct Dequantizer<QType::Q2_K> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    unpack256<FormatQ2K>(p, q);
    const float d = half_to_float(p + 80), dmin = half_to_float(p + 82);
    for (int s = 0; s < 16; ++s) {
      const float ds = d * static_cast<float>(p[s] & 15), dm = dmin * static_cast<float>(p[s] >> 4);
      for (int i = 0; i < 16; ++i) out[16 * s + i] = ds * static_cast<float>(q[16 * s + i]) - dm;
    }
  }
};

template <> struct Dequantizer<QType::Q3_K> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    int8_t scales[16];
    unpack256<FormatQ3K>(p, q);
    unpack_q3_scales(p + 96, scales);
    const float d = half_to_float(p + 108);
    for (int s = 0; s < 16; ++s) {
      const float ds = d * static_cast<float>(scales[s]);
      for (int i = 0; i < 16; ++i) out[16 * s + i] = ds * static_cast<float>(static_cast<int>(q[16 * s + i]) - 4);
    }
  }
};

template <class F> struct TernaryDequantizer {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    F::codes(p, q);
    const float d = half_to_float(p + F::d_at);
    for (int i = 0; i < 256; ++i) out[i] = d * static_cast<float>(static_cast<int>(q[i]) - 1);
  }
};
template <> struct Dequantizer<QType::TQ1_0> : TernaryDequantizer<FormatTQ1> {};
template <> struct Dequantizer<QType::TQ2_0> : TernaryDequantizer<FormatTQ2> {};

template <> struct Dequantizer<QType::Q1_0> {
  static void block(const uint8_t* p, float* out) {
    const float d = half_to_float(p);
    for (int i = 0; i < 128; ++i) out[i] = (p[2 + i / 8] >> (i % 8) & 1) != 0 ? d : -d;
  }
};

}  // namespace
