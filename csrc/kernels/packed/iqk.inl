// Types of ik_llama.cpp (its ggml-common.h and iqk_quantize.cpp): super-blocks of values that codes look up, with a bit
// b for every sub-block that adds a number to its values. Included by a tier file after signed.inl, whose products
// these are. w = d s (table[q] + n b), with the scale s of a sub-block of 16 weights, or of 32 (_KS, _KSS), and blocks
// in rows:
//   IQ2_K   76 B / 256: half d; b[16] in 2 B; 4-bit s + 8 [16]; codes as in Q2_K, qs[64]                        n = 5
//   IQ3_K  110 B / 256: half d; b[16]; sign of s[16] in 2 B; 4-bit (|s| - 1) / 2 [16]; qs[64] as in Q2_K; their third
//                       bits qh[32] as in Q5_K                                                                  n = 4
//   IQ4_K  144 B / 256: half d; b[16]; 6-bit s + 32 [16] in 4 + 8 B; nibbles qs[128], as in IQ4_XS              n = 4
//   IQ5_K  176 B / 256: the same, nibbles as in Q4_K, then their fifth bits qh[32] as in Q5_K                   n = 2
//   IQ6_K  212 B / 256: half d; b[16]; int8 s[16]; nibbles qs[128] as in Q4_K; upper bits qh[64] as in Q6_K     n = 1
// Of the following d is in front of a row's blocks, once: half of the first three, fp32 of the others.
//   IQ2_KS  70 B / 256: b[8]; fifth bits of s[8]; 4-bit s + 16 [8]; qs[64] as IQ2_K                             n = 5
//   IQ3_KS 102 B / 256: fifth bits of s[8]; b[8]; 4-bit s + 16 [8], s[4 + i] above s[i]; qs[64]; qh[32]         n = 4
//   IQ2_KL  86 B / 256: 2-bit uppers of s + 32 [8] in 2 B; their nibbles, s[4 + i] above s[i]; nibbles of codes
//                       qs[64] as Q4_K's of 32, two values of IQ3_KS each; their fifth bits qh[16]              b = 0
//   IQ4_KS 136 B / 256: bytes s + 127 + b, s odd; nibbles as IQ4_K                                              n = 4
//   IQ4_KSS 128 B / 256: 16-bit words, 8 for 32 weights, whose lowest bits are a byte of IQ4_KS, the first one's the
//                       lowest; without these and xor-ed with half of itself, a word is two bytes of nibbles    n = 4
//   IQ5_KS 168 B / 256: bytes as IQ4_KS; nibbles and fifth bits as IQ5_K                                        n = 2
// Tiles: signed.inl. A scale and its b are a byte there: 2 s + b, or, where s is odd, s with b for its lowest bit.
// IQ2_K and IQ6_K have bytes of scales as in the file, and behind their lines 32 bytes of b, two for a row (padded to
// 64). IQ4_KSS is packed as IQ4_KS, IQ2_KL as IQ3_KS, of whose values
// its pairs are.

namespace {

struct IqkSub { int scale, b; };

// Value and bit of a nibble of a byte, and a bit of a field.
inline int nibble_at(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }
inline int bit_at(const uint8_t* p, int i) { return p[i / 8] >> (i % 8) & 1; }

template <class F> struct IqkDequantizer {
  static void block(const uint8_t* p, float* out) { scaled(p, half_to_float(p), out); }
  static void scaled(const uint8_t* p, float d, float* out) {
    constexpr int size = 256 / F::subs;
    uint8_t q[256];
    unpack256<F>(p, q);
    for (int s = 0; s < F::subs; ++s) {
      const IqkSub sub = F::sub(p, s);
      const float ds = d * static_cast<float>(sub.scale);
      for (int i = size * s; i < size * (s + 1); ++i)
        out[i] = ds * static_cast<float>(F::table[q[i]] + sub.b * kShiftBy<F>);
    }
  }
};

// The scales of two sub-blocks, from two ints.
inline vi two_scales(vi first, vi second) { return ori(andi(first, set1i(0xffff)), shl<16>(second)); }

// T has byte_of(sub), how a scale and its bit are packed; scale_pair(p, j) are the scales of sub-blocks 2 j and 2 j
// + 1.
template <class T, class Layout> struct PackedIqk : PackedSigned<T, Layout> {
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    for (int s = 0; s < Layout::subs; ++s)
      pack_pair(out + PackedSigned<T, Layout>::scales, s, r, static_cast<uint8_t>(T::byte_of(Layout::sub(p, s))));
  }
};
template <class T, class Layout> struct PackedTwice : PackedIqk<T, Layout> {
  static int byte_of(IqkSub sub) { return 2 * sub.scale + sub.b; }
  static vi scale_pair(const uint8_t* p, int j) {
    const vi x = pairs_s8(p + 32 * j);
    return two_scales(sar<1>(lane_scale_low(x)), sar<1>(lane_scale_high(x)));
  }
};
template <class T, class Layout> struct PackedOdd : PackedIqk<T, Layout> {
  static int byte_of(IqkSub sub) { return sub.scale - 1 + sub.b; }
  static vi scale_pair(const uint8_t* p, int j) { return ori(pairs_s8(p + 32 * j), set1i(0x00010001)); }
};
// Of 16 sub-blocks whose bits lie at T::marks.
template <class T, class Layout> struct PackedMarked : PackedSigned<T, Layout> {
  static void pack_marks(const uint8_t* p, int r, uint8_t* out) {
    if (r == 0) std::memset(out + T::marks + 32, 0, 32);
    std::memcpy(out + T::marks + 2 * r, p + 2, 2);
  }
  template <int ODD> static wb shift(const uint8_t* p, int j) {
    alignas(64) int32_t pairs[16];
    storei(pairs, pairs_u8(p + T::marks));
    const wb both = load_wb(reinterpret_cast<const uint8_t*>(pairs));
    const wb bit = bits_from(j < 4 ? spread_byte<0>(both) : spread_byte<2>(both), (2 * j + ODD) % 8, 1);
    return lookup16(bit, kShifts<kShiftBy<Layout>>.v);
  }
};

// ---- codes of rows, and the values of codes ----

template <int AT, int S> inline vb two_bits(const uint8_t* p) {
  return shr_mask<2 * (S % 4)>(loadb(p + AT + 32 * (S / 4)), 3);
}
// Bit S of 32 bytes as bit TO, which is at most S + 3.
template <int AT, int S, int TO> inline vb one_bit(const uint8_t* p) {
  const vb x = loadb(p + AT);
  if constexpr (S < TO) return mask_shl<(S < TO ? TO - S : 0)>(x, 1 << S);
  return shr_mask<(S < TO ? 0 : S - TO)>(x, 1 << TO);
}
template <int AT, int S> inline vb nibbles_of_64(const uint8_t* p) {
  const vb x = loadb(p + AT + 32 * (S / 2));
  return S % 2 == 0 ? andb(x, 15) : shr_mask<4>(x, 15);
}

constexpr int8_t kIq2Values[16] = {-31, -13, 1, 17};
constexpr int8_t kIq3Values[16] = {-63, -40, -23, -10, 1, 13, 28, 47};
constexpr int8_t kIq5Values[32] = {-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
                                   -1,   5,    11,   17,  23,  29,  36,  43,  51,  59,  68,  77,  87,  97,  109, 121};
constexpr int8_t kIq6Values[64] = {-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
                                   -51,  -47,  -44,  -40,  -37,  -34, -31, -28, -25, -22, -19, -16, -13, -11, -8,  -5,
                                   -2,   0,    3,    6,    9,    12,  14,  17,  20,  23,  27,  30,  33,  36,  40,  44,
                                   47,   51,   55,   59,   63,   68,  72,  77,  82,  87,  92,  98,  103, 109, 115, 121};

template <uint8_t FLIP> constexpr ByteTable kIq2Table(kIq2Values, FLIP);
template <uint8_t FLIP> constexpr ByteTable kIq3Table(kIq3Values, FLIP);
template <uint8_t FLIP> constexpr ByteTable kIq5First(kIq5Values, FLIP);
template <uint8_t FLIP> constexpr ByteTable kIq6First(kIq6Values, FLIP);
constexpr int8_t kOnlyFirst[16] = {-1}, kBitToFour[16] = {0, 4};
constexpr ByteTable kUnlessSet(kOnlyFirst, 0), kThirdBit(kBitToFour, 0);
// What makes 16 values of 16 others.
constexpr ByteTable changes(const int8_t* from, const int8_t* to) {
  ByteTable table(from, 0);
  for (int i = 0; i < 16; ++i) table.v[i] = static_cast<uint8_t>(table.v[i] ^ static_cast<uint8_t>(to[i]));
  return table;
}
constexpr ByteTable kIq5Change = changes(kIq5Values, kIq5Values + 16);
constexpr ByteTable kIq6Change = changes(kIq6Values, kIq6Values + 16), kIq6Upper = changes(kIq6Values, kIq6Values + 32),
                    kIq6UpperChange = changes(kIq6Values + 32, kIq6Values + 48);

// values, changed by what codes look up where a bit, 0 or 1, is set.
inline wb changed(wb values, wb bit, wb change) {
  const wb mask = lookup16(bit, kUnlessSet.v);
  return xor_bytes(values, xor_bytes(mask, or_bytes(change, mask)));  // change & ~mask
}

struct TwoBitValues {
  static constexpr int upper_bits = 0;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t*, int, int, wb codes) {
    return lookup16(codes, kIq2Table<FLIP>.v);
  }
};
template <int64_t BITS> struct ThreeBitValues {
  static constexpr int upper_bits = 1;
  static constexpr int64_t bits = BITS;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t* p, int g, int i, wb codes) {
    const wb third = bits_from(load_wb(p + bits + 128 * g + 64 * IS_HIGH), i, 1);
    return lookup16(or_bytes(codes, lookup16(third, kThirdBit.v)), kIq3Table<FLIP>.v);
  }
};
struct FourBitValues {
  static constexpr int upper_bits = 0;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t*, int, int, wb codes) {
    return lookup16(codes, kIq4Table<FLIP>.v);
  }
};
template <int64_t BITS> struct FiveBitValues {
  static constexpr int upper_bits = 1;
  static constexpr int64_t bits = BITS;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t* p, int g, int i, wb codes) {
    const wb fifth = bits_from(load_wb(p + bits + 128 * g + 64 * IS_HIGH), i, 1);
    return changed(lookup16(codes, kIq5First<FLIP>.v), fifth, lookup16(codes, kIq5Change.v));
  }
};

// ---- the types, one by one ----

struct FormatIQ2K {
  static constexpr int bytes = 76, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq2Values;
  template <int S> static vb chunk(const uint8_t* p) { return two_bits<12, S>(p); }
  static IqkSub sub(const uint8_t* p, int s) { return {nibble_at(p + 4, s) - 8, bit_at(p + 2, s)}; }
};
template <> constexpr int kShiftBy<FormatIQ2K> = 5;
struct PackedIQ2K : PackedMarked<PackedIQ2K, FormatIQ2K>, TwoBitValues {
  static constexpr int64_t lines = 128, marks = lines + 1024, bytes = marks + 64;
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    for (int i = 0; i < 8; ++i) pack_pair(out, i, r, p[4 + i]);
    pack_marks(p, r, out);
  }
  static vi scale_pair(const uint8_t* p, int j) {
    const vi four = pairs_u8(p + 32 * (j / 2)), eight = set1i(8);
    const vi x = j % 2 == 0 ? lane_scale_low(four) : lane_scale_high(four);
    return two_scales(subi(andi(x, set1i(15)), eight), subi(sar<4>(x), eight));
  }
};
template <> constexpr int kGroupRun<PackedIQ2K> = 4;

struct FormatIQ3K {
  static constexpr int bytes = 110, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq3Values;
  template <int S> static vb chunk(const uint8_t* p) { return orb(two_bits<14, S>(p), one_bit<78, S, 2>(p)); }
  static IqkSub sub(const uint8_t* p, int s) {
    const int size = 2 * nibble_at(p + 6, s) + 1;
    return {bit_at(p + 4, s) != 0 ? -size : size, bit_at(p + 2, s)};
  }
};
template <> constexpr int kShiftBy<FormatIQ3K> = 4;
struct PackedIQ3K : PackedOdd<PackedIQ3K, FormatIQ3K>, ThreeBitValues<256 + 1024> {
  static constexpr int64_t bytes = 256 + 1024 + 512;
};
template <> constexpr int kGroupRun<PackedIQ3K> = 4;

// Sub-block s of IQ4_K and IQ5_K: 4 bits of its scale in scales_l, 2 in scales_h.
inline IqkSub six_bit_sub(const uint8_t* p, int s) {
  return {(nibble_at(p + 8, s) | (p[4 + s / 4] >> (s % 4 * 2) & 3) << 4) - 32, bit_at(p + 2, s)};
}
struct FormatIQ4K {
  static constexpr int bytes = 144, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq4Values;
  template <int S> static vb chunk(const uint8_t* p) { return nibbles16(p + 16 + 16 * S); }
  static IqkSub sub(const uint8_t* p, int s) { return six_bit_sub(p, s); }
};
template <> constexpr int kShiftBy<FormatIQ4K> = 4;
struct PackedIQ4K : PackedTwice<PackedIQ4K, FormatIQ4K>, FourBitValues { static constexpr int64_t bytes = 256 + 2048; };

struct FormatIQ5K {
  static constexpr int bytes = 176, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq5Values;
  template <int S> static vb chunk(const uint8_t* p) { return orb(nibbles_of_64<16, S>(p), one_bit<144, S, 4>(p)); }
  static IqkSub sub(const uint8_t* p, int s) { return six_bit_sub(p, s); }
};
template <> constexpr int kShiftBy<FormatIQ5K> = 2;
struct PackedIQ5K : PackedTwice<PackedIQ5K, FormatIQ5K>, FiveBitValues<256 + 2048> {
  static constexpr int64_t bytes = 256 + 2048 + 512;
};

struct FormatIQ6K {
  static constexpr int bytes = 212, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq6Values;
  template <int S> static vb chunk(const uint8_t* p) {
    const vb high = loadb(p + 148 + 32 * (S / 4));
    if constexpr (S % 4 < 2) return orb(nibbles_of_64<20, S>(p), mask_shl<4 - 2 * (S % 2)>(high, 3 << (2 * (S % 2))));
    return orb(nibbles_of_64<20, S>(p), shr_mask<2 * (S % 2)>(high, 48));
  }
  static IqkSub sub(const uint8_t* p, int s) { return {static_cast<int8_t>(p[4 + s]), bit_at(p + 2, s)}; }
};
template <> constexpr int kShiftBy<FormatIQ6K> = 1;
struct PackedIQ6K : PackedMarked<PackedIQ6K, FormatIQ6K> {
  static constexpr int upper_bits = 2;
  static constexpr int64_t bits = 256 + 2048, marks = bits + 1024, bytes = marks + 64;
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    for (int s = 0; s < 16; ++s) pack_pair(out, s, r, p[4 + s]);
    pack_marks(p, r, out);
  }
  static vi scale_pair(const uint8_t* p, int j) { return pairs_s8(p + 32 * j); }
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t* p, int g, int i, wb codes) {
    const wb upper = load_wb(p + bits + 256 * g + 64 * (i % 4));
    const int at = 4 * IS_HIGH + i / 4 * 2;
    const wb fifth = bits_from(upper, at, 1), sixth = bits_from(upper, at + 1, 1);
    const wb first = changed(lookup16(codes, kIq6First<FLIP>.v), fifth, lookup16(codes, kIq6Change.v));
    // From what the fifth bit has chosen of the lower half to what it has chosen of the upper one.
    const wb across = changed(lookup16(codes, kIq6Upper.v), fifth,
                              xor_bytes(lookup16(codes, kIq6Change.v), lookup16(codes, kIq6UpperChange.v)));
    return changed(first, sixth, across);
  }
};

struct FormatIQ2KS {
  static constexpr int bytes = 70, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq2Values;
  template <int S> static vb chunk(const uint8_t* p) { return two_bits<6, S>(p); }
  static IqkSub sub(const uint8_t* p, int s) {
    return {(nibble_at(p + 2, s) | bit_at(p + 1, s) << 4) - 16, bit_at(p, s)};
  }
};
template <> constexpr int kShiftBy<FormatIQ2KS> = 5;
template <> constexpr int kRowHead<FormatIQ2KS> = 2;
struct PackedIQ2KS : PackedTwice<PackedIQ2KS, FormatIQ2KS>, TwoBitValues {
  static constexpr int64_t bytes = 128 + 1024;
};
template <> constexpr int kGroupRun<PackedIQ2KS> = 4;

struct FormatIQ3KS {
  static constexpr int bytes = 102, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq3Values;
  template <int S> static vb chunk(const uint8_t* p) { return orb(two_bits<6, S>(p), one_bit<70, S, 2>(p)); }
  static IqkSub sub(const uint8_t* p, int s) {
    return {((p[2 + s % 4] >> (s / 4 * 4) & 15) | bit_at(p, s) << 4) - 16, bit_at(p + 1, s)};
  }
};
template <> constexpr int kShiftBy<FormatIQ3KS> = 4;
template <> constexpr int kRowHead<FormatIQ3KS> = 2;
struct PackedIQ3KS : PackedTwice<PackedIQ3KS, FormatIQ3KS>, ThreeBitValues<128 + 1024> {
  static constexpr int64_t bytes = 128 + 1024 + 512;
};
template <> constexpr int kGroupRun<PackedIQ3KS> = 4;

// Codes of IQ3_KS that a pair of IQ2_KL stands for.
constexpr uint8_t kIq2Pairs[32][2] = {{0, 2}, {0, 5}, {1, 0}, {1, 3}, {1, 5}, {1, 7}, {2, 1}, {2, 2},
                                      {2, 4}, {2, 5}, {2, 6}, {3, 0}, {3, 4}, {3, 5}, {3, 7}, {4, 2},
                                      {4, 3}, {4, 4}, {4, 5}, {4, 6}, {5, 1}, {5, 2}, {5, 3}, {5, 4},
                                      {5, 5}, {6, 0}, {6, 2}, {6, 4}, {6, 6}, {6, 7}, {7, 2}, {7, 5}};
struct FormatIQ2KL {
  static constexpr int bytes = 86, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq3Values;
  template <int S> static vb chunk(const uint8_t* p) {
    uint8_t codes[32];
    for (int j = 0; j < 16; ++j) {
      const int pair = (p[6 + S / 2 * 16 + j] >> (S % 2 * 4) & 15) | (p[70 + j] >> S & 1) << 4;
      std::memcpy(codes + 2 * j, kIq2Pairs[pair], 2);
    }
    return loadb(codes);
  }
  static IqkSub sub(const uint8_t* p, int s) {
    const int upper = p[s / 4] >> (s % 4 * 2) & 3;
    return {((p[2 + s % 4] >> (s / 4 * 4) & 15) | upper << 4) - 32, 0};
  }
};
template <> constexpr int kShiftBy<FormatIQ2KL> = 4;
template <> constexpr int kRowHead<FormatIQ2KL> = 2;
struct PackedIQ2KL : PackedTwice<PackedIQ2KL, FormatIQ2KL>, ThreeBitValues<128 + 1024> {
  static constexpr int64_t bytes = 128 + 1024 + 512;
};
template <> constexpr int kGroupRun<PackedIQ2KL> = 4;

inline IqkSub byte_sub(int byte) { return {(byte & 254) - 127, byte & 1}; }
struct FormatIQ4KS {
  static constexpr int bytes = 136, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq4Values;
  template <int S> static vb chunk(const uint8_t* p) { return nibbles16(p + 8 + 16 * S); }
  static IqkSub sub(const uint8_t* p, int s) { return byte_sub(p[s]); }
};
template <> constexpr int kShiftBy<FormatIQ4KS> = 4;
template <> constexpr int kRowHead<FormatIQ4KS> = 4;
struct PackedIQ4KS : PackedOdd<PackedIQ4KS, FormatIQ4KS>, FourBitValues {
  static constexpr int64_t bytes = 128 + 2048;
};

struct FormatIQ4KSS {
  static constexpr int bytes = 128, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq4Values;
  template <int S> static vb chunk(const uint8_t* p) {
    uint64_t words[2];  // four words of 16 bits each
    std::memcpy(words, p + 16 * S, 16);
    for (uint64_t& word : words) {
      word &= 0xfffefffefffefffeu;
      word ^= word >> 1 & 0x7fff7fff7fff7fffu;
    }
    uint8_t nibbles[16];
    std::memcpy(nibbles, words, 16);
    return nibbles16(nibbles);
  }
  static IqkSub sub(const uint8_t* p, int s) {
    int byte = 0;
    for (int i = 0; i < 8; ++i) byte |= (p[16 * s + 2 * i] & 1) << i;
    return byte_sub(byte);
  }
};
template <> constexpr int kShiftBy<FormatIQ4KSS> = 4;
template <> constexpr int kRowHead<FormatIQ4KSS> = 4;
struct PackedIQ4KSS : PackedOdd<PackedIQ4KSS, FormatIQ4KSS>, FourBitValues {
  static constexpr int64_t bytes = 128 + 2048;
};

struct FormatIQ5KS {
  static constexpr int bytes = 168, subs = 8;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq5Values;
  template <int S> static vb chunk(const uint8_t* p) { return orb(nibbles_of_64<8, S>(p), one_bit<136, S, 4>(p)); }
  static IqkSub sub(const uint8_t* p, int s) { return byte_sub(p[s]); }
};
template <> constexpr int kShiftBy<FormatIQ5KS> = 2;
template <> constexpr int kRowHead<FormatIQ5KS> = 4;
struct PackedIQ5KS : PackedOdd<PackedIQ5KS, FormatIQ5KS>, FiveBitValues<128 + 2048> {
  static constexpr int64_t bytes = 128 + 2048 + 512;
};

template <> struct Dequantizer<QType::IQ2_K> : IqkDequantizer<FormatIQ2K> {};
template <> struct Dequantizer<QType::IQ3_K> : IqkDequantizer<FormatIQ3K> {};
template <> struct Dequantizer<QType::IQ4_K> : IqkDequantizer<FormatIQ4K> {};
template <> struct Dequantizer<QType::IQ5_K> : IqkDequantizer<FormatIQ5K> {};
template <> struct Dequantizer<QType::IQ6_K> : IqkDequantizer<FormatIQ6K> {};
template <> struct Dequantizer<QType::IQ2_KS> : IqkDequantizer<FormatIQ2KS> {};
template <> struct Dequantizer<QType::IQ3_KS> : IqkDequantizer<FormatIQ3KS> {};
template <> struct Dequantizer<QType::IQ2_KL> : IqkDequantizer<FormatIQ2KL> {};
template <> struct Dequantizer<QType::IQ4_KS> : IqkDequantizer<FormatIQ4KS> {};
template <> struct Dequantizer<QType::IQ4_KSS> : IqkDequantizer<FormatIQ4KSS> {};
template <> struct Dequantizer<QType::IQ5_KS> : IqkDequantizer<FormatIQ5KS> {};
template <> struct Kernel<QType::IQ2_K> : KernelSigned<PackedIQ2K> {};
template <> struct Kernel<QType::IQ3_K> : KernelSigned<PackedIQ3K> {};
template <> struct Kernel<QType::IQ4_K> : KernelSigned<PackedIQ4K> {};
template <> struct Kernel<QType::IQ5_K> : KernelSigned<PackedIQ5K> {};
template <> struct Kernel<QType::IQ6_K> : KernelSigned<PackedIQ6K> {};
template <> struct Kernel<QType::IQ2_KS> : KernelSigned<PackedIQ2KS> {};
template <> struct Kernel<QType::IQ3_KS> : KernelSigned<PackedIQ3KS> {};
template <> struct Kernel<QType::IQ2_KL> : KernelSigned<PackedIQ2KL> {};
template <> struct Kernel<QType::IQ4_KS> : KernelSigned<PackedIQ4KS> {};
template <> struct Kernel<QType::IQ4_KSS> : KernelSigned<PackedIQ4KSS> {};
template <> struct Kernel<QType::IQ5_KS> : KernelSigned<PackedIQ5KS> {};

}  // namespace
