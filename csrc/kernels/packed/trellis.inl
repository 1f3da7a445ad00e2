// Types of ik_llama.cpp whose codes are seeds (its ggml-common.h and iqk_quantize.cpp). Included by grid.inl, whose
// staged blocks and products these have. Value k of a code is, with x = (code + 4096) 0xCBAC1FED^(k + 1) mod 2^32, the
// sum of the lower 6 bits of the four bytes of x, less 126. w = d s value, with an fp32 d in front of a row's blocks
// and the scale s of 32 columns; blocks in rows:
//   IQ1_KT  56 B / 256: bytes of 4 bits of s, by IQ4_NL's values, and above them bit 12 of 4 codes; low bytes of 32
//                       codes of 8 columns; their bits 8 .. 11, of 16 codes in the low, then in the high nibbles
//   IQ2_KT  68 B / 256: nibbles of s as above, of sub-blocks 0 .. 3, 4 .. 7 above them; 32 codes of 16 bits, 8 columns
//   IQ3_KT 100 B / 256: nibbles s from 0 to 15; codes as IQ2_KT; byte i: signs of columns i, 32 + i, ... of |value|
//   IQ4_KT 128 B / 256: 8 words: bit 15 of the codes, 7 bits of s + 64, bits 12 .. 14 of 8 codes of 4 columns; low
//                       bytes of 64 codes; their bits 8 .. 11, as IQ1_KT
// In a tile (packed.inl) after a head of 16 fp32 d, a block has 8 parts of 32 columns: lines with two codes of a row in
// a word of 16 rows (IQ1_KT: the low bytes of four), of IQ3_KT one with signs, byte j those of columns 8 j .. 8 j + 7.
// Behind them of IQ1_KT 4 lines with bits 8 .. 11 of two parts; then bytes of scales of 16 rows: nibbles of two
// sub-blocks, IQ1_KT's as in the file, IQ4_KT's whole.

namespace {

struct TrellisPowers {
  int32_t v[8];
  constexpr TrellisPowers() : v() {
    uint32_t power = 1;
    for (int32_t& one : v) one = static_cast<int32_t>(power *= 0xCBAC1FEDu);
  }
};
constexpr TrellisPowers kTrellisPowers;
constexpr int kSeedOffset = 4096, kValueOffset = 126;

// A block, each field in a number of its own.
struct TrellisBlock {
  uint16_t codes[64];  // 64 of IQ4_KT, else 32
  uint8_t signs[32];   // bit i: column i of 8 is negative
  int8_t scales[8];
};

inline int trellis_value(int code, int k) {
  const uint32_t x = static_cast<uint32_t>(code + kSeedOffset) * static_cast<uint32_t>(kTrellisPowers.v[k]);
  return static_cast<int>((x & 63) + (x >> 8 & 63) + (x >> 16 & 63) + (x >> 24 & 63)) - kValueOffset;
}

struct FormatIQ1KT {
  static constexpr int bytes = 56, subs = 8, cols = 8;
  static constexpr bool has_min = false, is_absolute = false;
  static void read(const uint8_t* p, TrellisBlock& out) {
    for (int i = 0; i < 32; ++i)
      out.codes[i] = static_cast<uint16_t>(p[8 + i] | (p[40 + i % 16] >> (i / 16 * 4) & 15) << 8 |
                                           (p[i / 4] >> (4 + i % 4) & 1) << 12);
    for (int s = 0; s < 8; ++s) out.scales[s] = kIq4Values[p[s] & 15];
  }
};
inline int nibble_of_half(const uint8_t* p, int s) { return p[s % 4] >> (s / 4 * 4) & 15; }
struct FormatIQ2KT {
  static constexpr int bytes = 68, subs = 8, cols = 8;
  static constexpr bool has_min = false, is_absolute = false;
  static void read(const uint8_t* p, TrellisBlock& out) {
    std::memcpy(out.codes, p + 4, 64);
    for (int s = 0; s < 8; ++s) out.scales[s] = kIq4Values[nibble_of_half(p, s)];
  }
};
struct FormatIQ3KT {
  static constexpr int bytes = 100, subs = 8, cols = 8;
  static constexpr bool has_min = false, is_absolute = true;
  static void read(const uint8_t* p, TrellisBlock& out) {
    std::memcpy(out.codes, p + 4, 64);
    for (int i = 0; i < 32; ++i) {
      int signs = 0;
      for (int c = 0; c < 8; ++c) signs |= (p[68 + i % 4 * 8 + c] >> (i / 4) & 1) << c;
      out.signs[i] = static_cast<uint8_t>(signs);
    }
    for (int s = 0; s < 8; ++s) out.scales[s] = static_cast<int8_t>(nibble_of_half(p, s));
  }
};
struct FormatIQ4KT {
  static constexpr int bytes = 128, subs = 8, cols = 4;
  static constexpr bool has_min = false, is_absolute = false;
  static void read(const uint8_t* p, TrellisBlock& out) {
    for (int i = 0; i < 64; ++i) {
      const uint32_t word = word_at(p + i / 8 * 4);
      out.codes[i] = static_cast<uint16_t>(p[32 + i] | (p[96 + i % 32] >> (i / 32 * 4) & 15) << 8 |
                                           (word >> (8 + i % 8 * 3) & 7) << 12 | (word & 1) << 15);
    }
    for (int s = 0; s < 8; ++s) out.scales[s] = static_cast<int8_t>((p[4 * s] >> 1) - 64);
  }
};
template <> constexpr int kRowHead<FormatIQ1KT> = 4;
template <> constexpr int kRowHead<FormatIQ2KT> = 4;
template <> constexpr int kRowHead<FormatIQ3KT> = 4;
template <> constexpr int kRowHead<FormatIQ4KT> = 4;

template <class F> struct TrellisDequantizer {
  static void scaled(const uint8_t* p, float d, float* out) {
    TrellisBlock block = {};
    F::read(p, block);
    for (int i = 0; i < 256; ++i) {
      int value = trellis_value(block.codes[i / F::cols], i % F::cols);
      if (F::is_absolute && value < 0) value = -value;
      if (F::is_absolute && (block.signs[i / 8] >> (i % 8) & 1) != 0) value = -value;
      out[i] = d * static_cast<float>(block.scales[i / 32]) * static_cast<float>(value);
    }
  }
};
template <> struct Dequantizer<QType::IQ1_KT> : TrellisDequantizer<FormatIQ1KT> {};
template <> struct Dequantizer<QType::IQ2_KT> : TrellisDequantizer<FormatIQ2KT> {};
template <> struct Dequantizer<QType::IQ3_KT> : TrellisDequantizer<FormatIQ3KT> {};
template <> struct Dequantizer<QType::IQ4_KT> : TrellisDequantizer<FormatIQ4KT> {};

// LINES: of codes in a part. SCALES: bytes of scales in a block.
template <class FORMAT, int LINES, int SCALES> struct PackedTrellis {
  using Format = FORMAT;
  using F = FORMAT;
  static constexpr GridSpec spec = {FORMAT::cols, 8, 1.0f, false};
  static constexpr bool has_nibbles = LINES == 1;
  static constexpr int64_t code_bytes = 64 * LINES, part_bytes = code_bytes + (FORMAT::is_absolute ? 64 : 0);
  static constexpr int64_t upper_at = 8 * part_bytes, scales_at = upper_at + (has_nibbles ? 256 : 0);
  static constexpr int64_t bytes = scales_at + SCALES;
};
using PackedIQ1KT = PackedTrellis<FormatIQ1KT, 1, 128>;
using PackedIQ2KT = PackedTrellis<FormatIQ2KT, 2, 64>;
using PackedIQ3KT = PackedTrellis<FormatIQ3KT, 2, 64>;
using PackedIQ4KT = PackedTrellis<FormatIQ4KT, 4, 128>;
template <> struct Kernel<QType::IQ1_KT> : KernelGrid<PackedIQ1KT> {};
template <> struct Kernel<QType::IQ2_KT> : KernelGrid<PackedIQ2KT> {};
template <> struct Kernel<QType::IQ3_KT> : KernelGrid<PackedIQ3KT> {};
template <> struct Kernel<QType::IQ4_KT> : KernelGrid<PackedIQ4KT> {};

template <class FORMAT, int LINES, int SCALES> constexpr bool kIsTrellis<PackedTrellis<FORMAT, LINES, SCALES>> = true;
template <class FORMAT, int LINES, int SCALES> constexpr bool kHasGrid<PackedTrellis<FORMAT, LINES, SCALES>> = true;

// ---- from seeds to values ----

// Value k of the codes whose seeds these are, + 126, in the uppermost byte; what is below it is not used.
inline vi trellis_sums(vi seeds, int k) {
  const vi x = andi(mul_words(seeds, set1i(kTrellisPowers.v[k])), set1i(0x3f3f3f3f));
  return mul_words(x, set1i(0x01010101));
}
inline vi upper_byte(vi x) { return andi(sar<24>(x), set1i(255)); }
inline vi trellis_size(vi seeds, int k) {
  const vi value = subi(upper_byte(trellis_sums(seeds, k)), set1i(kValueOffset));
  return maxi(value, subi(set1i(0), value));
}
inline void store_lanes(uint8_t* p, vi x) { storei(reinterpret_cast<int32_t*>(p), x); }

// What makes a value of a sum, with `FLIP`: 128 more is bit 7 flipped.
template <uint8_t FLIP> struct LessOffset {
  alignas(64) uint8_t v[64];
  constexpr LessOffset() : v() {
    for (uint8_t& byte : v) byte = static_cast<uint8_t>(FLIP - kValueOffset);
  }
};
template <uint8_t FLIP> constexpr LessOffset<FLIP> kLessOffset;

// Values `first` to first + 3 of the codes of 16 rows as a line, or their sizes.
template <class P, uint8_t FLIP> inline void store_values(vi seeds, int first, uint8_t* line) {
  if constexpr (P::Format::is_absolute) {
    const vi a = trellis_size(seeds, first), b = trellis_size(seeds, first + 1);
    const vi c = trellis_size(seeds, first + 2), d = trellis_size(seeds, first + 3);
    store_lanes(line, ori(ori(a, shl<8>(b)), ori(shl<16>(c), shl<24>(d))));
  } else {
    const vi a = trellis_sums(seeds, first), b = trellis_sums(seeds, first + 1);
    const vi c = trellis_sums(seeds, first + 2), d = trellis_sums(seeds, first + 3);
    const vi low = ori(upper_byte(a), andi(sar<16>(b), set1i(0xff00)));
    const vi high = ori(andi(sar<8>(c), set1i(0xff0000)), andi(d, set1i(-16777216)));
    store_lanes(line, ori(low, high));
    store_wb(line, add_bytes(load_wb(line), load_wb(kLessOffset<FLIP>.v)));
  }
}

// The seeds of code j of part s.
template <class P> inline vi seeds_of(const uint8_t* p, int s, int j) {
  vi codes;
  const uint8_t* part = p + P::part_bytes * s;
  if constexpr (P::has_nibbles) {
    const vi low = lanes_of(load_wb(part)), above = lanes_of(grid_nibbles(p + P::upper_at, s));
    const vi marks = load_s8(p + P::scales_at + 16 * s);
    const vi shift = set1i(1 << (24 - 8 * j));  // byte j to the uppermost one
    codes = ori(upper_byte(mul_words(low, shift)), andi(sar<16>(mul_words(above, shift)), set1i(0xf00)));
    codes = ori(codes, andi(mul_words(marks, set1i(1 << (8 - j))), set1i(0x1000)));
  } else {
    const vi two = lanes_of(load_wb(part + 64 * (j / 2)));
    codes = andi(j % 2 == 0 ? two : sar<16>(two), set1i(0xffff));
  }
  return addi(codes, set1i(kSeedOffset));
}

// Part s of a block as 8 lines of int8 with `FLIP`.
template <class P, uint8_t FLIP> inline void store_trellis_part(const uint8_t* p, int s, uint8_t* w) {
  constexpr int lines = P::Format::cols / 4;
  for (int j = 0; j < 32 / P::Format::cols; ++j) {
    const vi seeds = seeds_of<P>(p, s, j);
    for (int i = 0; i < lines; ++i) store_values<P, FLIP>(seeds, 4 * i, w + 64 * (lines * j + i));
  }
  if constexpr (P::Format::is_absolute) sign_lines<FLIP>(load_wb(p + P::part_bytes * s + P::code_bytes), w);
}

// The scales of part s: 16 numbers.
template <class P> inline void store_trellis_scales(const uint8_t* p, int s, int32_t* out) {
  if constexpr (std::is_same_v<P, PackedIQ4KT>) {
    storei(out, load_s8(p + P::scales_at + 16 * s));
  } else {
    const vi bytes = load_s8(p + P::scales_at + 16 * (P::has_nibbles ? s : s / 2));
    storei(out, andi(P::has_nibbles || s % 2 == 0 ? bytes : sar<4>(bytes), set1i(15)));
    if constexpr (!P::Format::is_absolute)
      for (int r = 0; r < 16; ++r) out[r] = kIq4Values[out[r]];
  }
}

// ---- packing ----

template <class P> void pack_trellis_row(const TrellisBlock& row, const uint8_t* p, int r, uint8_t* out) {
  constexpr int codes = 32 / P::Format::cols;
  for (int i = 0; i < 8 * codes; ++i) {
    const int s = i / codes, j = i % codes, code = row.codes[i];
    uint8_t* part = out + P::part_bytes * s;
    if constexpr (P::has_nibbles) {
      part[4 * r + j] = static_cast<uint8_t>(code & 255);
      uint8_t& above = out[P::upper_at + 64 * (s / 2) + 4 * r + j];
      above = static_cast<uint8_t>(above | (code >> 8 & 15) << (s % 2 * 4));
    } else {
      std::memcpy(part + 64 * (j / 2) + 4 * r + 2 * (j % 2), &row.codes[i], 2);
    }
  }
  for (int s = 0; s < 8; ++s) {
    if constexpr (P::Format::is_absolute)
      std::memcpy(out + P::part_bytes * s + P::code_bytes + 4 * r, row.signs + 4 * s, 4);
    if constexpr (P::has_nibbles) {
      out[P::scales_at + 16 * s + r] = p[s];
    } else if constexpr (std::is_same_v<P, PackedIQ4KT>) {
      out[P::scales_at + 16 * s + r] = static_cast<uint8_t>(row.scales[s]);
    } else {
      uint8_t& two = out[P::scales_at + 16 * (s / 2) + r];
      two = static_cast<uint8_t>(two | nibble_of_half(p, s) << (s % 2 * 4));
    }
  }
}

template <class P> void pack_trellis_tile(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const int64_t blocks = k / 256, head = super_head<P>(blocks);
  std::memset(out, 0, static_cast<size_t>(head + blocks * P::bytes));
  TrellisBlock read = {};
  for (int r = 0; r < 16; ++r) {
    std::memcpy(out + 4 * r, rows[r], 4);
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* p = rows[r] + 4 + b * P::Format::bytes;
      P::Format::read(p, read);
      pack_trellis_row<P>(read, p, r, out + head + b * P::bytes);
    }
  }
}

}  // namespace
