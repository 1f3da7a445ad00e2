// ggml's types of 256 whose codes are looked up in a grid (runtime/grids.h): unpacking and dequantizing.
// Included by a tier file before quant.inl. Layouts are those of ggml-quants.h / gguf.quants; a code stands for 8
// columns (IQ3: 4), c = 2 s + 1 for the scale s of a sub-block of 32 (XS, IQ2_S, IQ1_M: 16), g for the grid's values:
//   IQ2_XXS 66 B: half d; 8 x (codes[4]; 4 x 7 bits of signs, 4 of scale)                      w = d/8 c (+-g)
//   IQ2_XS  74 B: half d; 32 x (9 bits of code, 7 of signs); 4-bit scales[16]                  w = d/8 c (+-g)
//   IQ2_S   82 B: half d; codes[32]; signs[32]; 2 upper bits of 32 codes; 4-bit scales[16]     w = d/8 c (+-g)
//   IQ3_XXS 98 B: half d; codes[64]; 8 x (4 x 7 bits of signs, 4 of scale)                     w = d/4 c (+-g)
//   IQ3_S  110 B: half d; codes[64]; upper bits of 64 codes; signs[32]; 4-bit scales[8]        w = d c (+-g)
//   IQ1_S   50 B: half d; codes[32]; 8 x (4 x 3 upper bits of codes, 3 of scale, delta)        w = d/8 c (8 g +- 1)
//   IQ1_M   56 B: codes[32]; 32 x (3 upper bits, delta); 16 x 3 bits of scale with half d between  w as IQ1_S
// Of 8 signs that are stored as 7, the last makes the number of minus signs even.

namespace {

// A block of 256, each field in a number of its own.
struct GridBlock {
  uint8_t d[2];
  uint16_t codes[64];  // 64 of IQ3, else 32
  uint8_t signs[32];   // bit i: column i of 8 is negative
  uint8_t scales[16];  // of sub-blocks of 32 the first 8
  uint8_t deltas[32];  // of IQ1, for each code: 1 is minus
};

inline uint8_t with_last_sign(uint32_t seven) {
  const uint32_t bits = seven & 127;
  return static_cast<uint8_t>(bits | static_cast<uint32_t>(__builtin_parity(bits)) << 7);
}
inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}
inline int pair_at(const uint8_t* p) { return p[0] | p[1] << 8; }

// Four times 7 signs and the scale of sub-block s.
inline void read_sign_word(uint32_t word, int s, GridBlock& out) {
  for (int j = 0; j < 4; ++j) out.signs[4 * s + j] = with_last_sign(word >> (7 * j));
  out.scales[s] = static_cast<uint8_t>(word >> 28);
}
inline void read_nibbles(const uint8_t* p, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) out[i] = p[i / 2] >> (i % 2 * 4) & 15;
}

struct FormatIQ2XXS {
  static constexpr int bytes = 66;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int s = 0; s < 8; ++s) {
      for (int j = 0; j < 4; ++j) out.codes[4 * s + j] = p[2 + 8 * s + j];
      read_sign_word(word_at(p + 6 + 8 * s), s, out);
    }
  }
};
struct FormatIQ2XS {
  static constexpr int bytes = 74;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int i = 0; i < 32; ++i) {
      const int code = pair_at(p + 2 + 2 * i);
      out.codes[i] = static_cast<uint16_t>(code & 511);
      out.signs[i] = with_last_sign(static_cast<uint32_t>(code) >> 9);
    }
    read_nibbles(p + 66, 16, out.scales);
  }
};
struct FormatIQ2S {
  static constexpr int bytes = 82;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int i = 0; i < 32; ++i)
      out.codes[i] = static_cast<uint16_t>(p[2 + i] | (p[66 + i / 4] >> (i % 4 * 2) & 3) << 8);
    std::memcpy(out.signs, p + 34, 32);
    read_nibbles(p + 74, 16, out.scales);
  }
};
struct FormatIQ3XXS {
  static constexpr int bytes = 98;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int i = 0; i < 64; ++i) out.codes[i] = p[2 + i];
    for (int s = 0; s < 8; ++s) read_sign_word(word_at(p + 66 + 4 * s), s, out);
  }
};
struct FormatIQ3S {
  static constexpr int bytes = 110;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int i = 0; i < 64; ++i) out.codes[i] = static_cast<uint16_t>(p[2 + i] | (p[66 + i / 8] >> (i % 8) & 1) << 8);
    std::memcpy(out.signs, p + 74, 32);
    read_nibbles(p + 106, 8, out.scales);
  }
};
struct FormatIQ1S {
  static constexpr int bytes = 50;
  static void read(const uint8_t* p, GridBlock& out) {
    std::memcpy(out.d, p, 2);
    for (int s = 0; s < 8; ++s) {
      const int upper = pair_at(p + 34 + 2 * s);
      for (int j = 0; j < 4; ++j) {
        out.codes[4 * s + j] = static_cast<uint16_t>(p[2 + 4 * s + j] | (upper >> (3 * j) & 7) << 8);
        out.deltas[4 * s + j] = static_cast<uint8_t>(upper >> 15);
      }
      out.scales[s] = upper >> 12 & 7;
    }
  }
};
struct FormatIQ1M {
  static constexpr int bytes = 56;
  static void read(const uint8_t* p, GridBlock& out) {
    int d = 0;
    for (int i = 0; i < 4; ++i) d |= pair_at(p + 48 + 2 * i) >> 12 << (4 * i);
    out.d[0] = static_cast<uint8_t>(d & 255);
    out.d[1] = static_cast<uint8_t>(d >> 8);
    for (int i = 0; i < 32; ++i) {
      const int upper = p[32 + i / 2] >> (i % 2 * 4);
      out.codes[i] = static_cast<uint16_t>(p[i] | (upper & 7) << 8);
      out.deltas[i] = static_cast<uint8_t>(upper >> 3 & 1);
    }
    for (int i = 0; i < 16; ++i) out.scales[i] = pair_at(p + 48 + i / 4 * 2) >> (i % 4 * 3) & 7;
  }
};

inline const auto& grid_of(FormatIQ2XXS) { return grid_tables.iq2_xxs; }
inline const auto& grid_of(FormatIQ2XS) { return grid_tables.iq2_xs; }
inline const auto& grid_of(FormatIQ2S) { return grid_tables.iq2_s; }
inline const auto& grid_of(FormatIQ3XXS) { return grid_tables.iq3_xxs; }
inline const auto& grid_of(FormatIQ3S) { return grid_tables.iq3_s; }
inline const auto& grid_of(FormatIQ1S) { return grid_tables.iq1; }
inline const auto& grid_of(FormatIQ1M) { return grid_tables.iq1; }

// What differs between the types beside their layout: columns of a code, sub-blocks, what d is multiplied with.
struct GridSpec {
  int cols, subs;
  float factor;
  bool has_delta;
};
constexpr GridSpec grid_spec(FormatIQ2XXS) { return {8, 8, 0.125f, false}; }
constexpr GridSpec grid_spec(FormatIQ2XS) { return {8, 16, 0.125f, false}; }
constexpr GridSpec grid_spec(FormatIQ2S) { return {8, 16, 0.125f, false}; }
constexpr GridSpec grid_spec(FormatIQ3XXS) { return {4, 8, 0.25f, false}; }
constexpr GridSpec grid_spec(FormatIQ3S) { return {4, 8, 1.0f, false}; }
constexpr GridSpec grid_spec(FormatIQ1S) { return {8, 8, 0.125f, true}; }
constexpr GridSpec grid_spec(FormatIQ1M) { return {8, 16, 0.125f, true}; }

// Products are exact in fp32 (11 bits of d, 5 of scale, 6 of value), so that their order does not matter.
template <class F> void dequantize_grid_row(const uint8_t* row, int64_t k, float* out) {
  constexpr GridSpec spec = grid_spec(F{});
  GridBlock block = {};
  for (int64_t b = 0; b < k / 256; ++b) {
    F::read(row + b * F::bytes, block);
    const float d = half_to_float(block.d) * spec.factor;
    for (int i = 0; i < 256; ++i) {
      uint8_t values[8];
      std::memcpy(values, &grid_of(F{}).entries[block.codes[i / spec.cols]], spec.cols);
      int value = static_cast<int8_t>(values[i % spec.cols]);
      if (spec.has_delta)
        value += 1 - 2 * block.deltas[i / 8];
      else if (block.signs[i / 8] >> (i % 8) & 1)
        value = -value;
      out[256 * b + i] = d * static_cast<float>((2 * block.scales[i * spec.subs / 256] + 1) * value);
    }
  }
}

template <class F> struct GridDequantizer {
  static void row(const uint8_t* row, int64_t k, float* out) { dequantize_grid_row<F>(row, k, out); }
};
template <> struct Dequantizer<QType::IQ2_XXS> : GridDequantizer<FormatIQ2XXS> {};
template <> struct Dequantizer<QType::IQ2_XS> : GridDequantizer<FormatIQ2XS> {};
template <> struct Dequantizer<QType::IQ2_S> : GridDequantizer<FormatIQ2S> {};
template <> struct Dequantizer<QType::IQ3_XXS> : GridDequantizer<FormatIQ3XXS> {};
template <> struct Dequantizer<QType::IQ3_S> : GridDequantizer<FormatIQ3S> {};
template <> struct Dequantizer<QType::IQ1_S> : GridDequantizer<FormatIQ1S> {};
template <> struct Dequantizer<QType::IQ1_M> : GridDequantizer<FormatIQ1M> {};

}  // namespace
