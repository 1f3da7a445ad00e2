// Re-laid weights of types whose codes are looked up in a grid (grids.inl). Included by a tier file after packed.inl,
// whose tiles these are: a head of 16 halves d for every block, then blocks of 256 columns. Results are those of (4) in
// gemm.inl, with q the signed value of the grid, 2 s + 1 for the scale and d times a power of two: all exact.
//
// A block has 8 parts of 32 columns, one line of codes (IQ3: two) each and, but for IQ1, one of signs; what does not
// fill bytes stands behind them. Byte 4 r + j of a line of codes is code j of row r, of a line of signs it is the signs
// of columns 8 j .. 8 j + 7. Where a file has 7 of 8 signs, the last bit of such a byte holds something else.
//
//   IQ2_XXS  parts (codes, signs); scale: 4 last bits of a row's signs                            66 B a row and block
//   IQ2_XS   parts (codes, signs); upper bits of codes: last bits of signs; scales                74 B
//   IQ2_S    parts (codes, signs); two upper bits of codes, of 4 parts in a line; scales          82 B
//   IQ3_XXS  parts (codes, codes, signs); scale as IQ2_XXS                                        98 B
//   IQ3_S    parts (codes, codes, signs); upper bits, of 8 parts in two lines; scales            110 B
//   IQ1_S    parts (codes); nibbles of 2 parts in a line: 3 upper bits of a code; the last bits of a row's four are
//            the scale and delta                                                                 50 B
//   IQ1_M    parts (codes); nibbles: 3 upper bits of a code, and the delta of row r, code j at 4 r + j; scales
//                                                                                                58 B (56 in the file)
// Scales: bytes of 16 rows, for sub-blocks 2 s (lower 4 bits) and 2 s + 1.
//
// A block is looked up once, into lines of int8, which all tokens of the call read from the first-level cache. Codes go
// through integer registers, which is no slower than gathers, or through permutations (grid_vbmi.inl).

namespace {

enum class GridUpper { None, LastSign, Two, One, Nibble };
enum class GridScales { LastSigns, Bytes, Nibble };

template <class FORMAT, GridUpper UPPER, GridScales SCALES> struct PackedGrid {
  using Format = FORMAT;
  static constexpr GridSpec spec = grid_spec(FORMAT{});
  struct F {
    static constexpr int subs = spec.subs;
    static constexpr bool has_min = false;
  };
  static constexpr GridUpper upper = UPPER;
  static constexpr GridScales scales = SCALES;
  static constexpr bool has_last_sign = UPPER != GridUpper::LastSign && SCALES != GridScales::LastSigns;
  static constexpr int64_t code_bytes = 64 * 8 / spec.cols, part_bytes = code_bytes + (spec.has_delta ? 0 : 64);
  static constexpr int64_t upper_at = 8 * part_bytes;
  static constexpr int64_t upper_bytes = UPPER == GridUpper::Two || UPPER == GridUpper::One ? 128
                                         : UPPER == GridUpper::Nibble                       ? 256
                                                                                            : 0;
  static constexpr int64_t scales_at = upper_at + upper_bytes;
  static constexpr int64_t bytes = scales_at + (SCALES == GridScales::Bytes ? 8 * spec.subs : 0);
};
using PackedIQ2XXS = PackedGrid<FormatIQ2XXS, GridUpper::None, GridScales::LastSigns>;
using PackedIQ2XS = PackedGrid<FormatIQ2XS, GridUpper::LastSign, GridScales::Bytes>;
using PackedIQ2S = PackedGrid<FormatIQ2S, GridUpper::Two, GridScales::Bytes>;
using PackedIQ3XXS = PackedGrid<FormatIQ3XXS, GridUpper::None, GridScales::LastSigns>;
using PackedIQ3S = PackedGrid<FormatIQ3S, GridUpper::One, GridScales::Bytes>;
using PackedIQ1S = PackedGrid<FormatIQ1S, GridUpper::Nibble, GridScales::Nibble>;
using PackedIQ1M = PackedGrid<FormatIQ1M, GridUpper::Nibble, GridScales::Bytes>;

template <class P> void pack_grid_tile(const uint8_t* const* rows, int64_t k, uint8_t* out);
template <class P> void pack_trellis_tile(const uint8_t* const* rows, int64_t k, uint8_t* out);
template <class P> constexpr bool kIsTrellis = false;  // see trellis.inl

template <class P> struct KernelGrid {
  using Packed = P;
  using Steps = StepsGrid<P>;
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) {
    if constexpr (kIsTrellis<P>)
      pack_trellis_tile<P>(rows, k, out);
    else
      pack_grid_tile<P>(rows, k, out);
  }
};
template <> struct Kernel<QType::IQ2_XXS> : KernelGrid<PackedIQ2XXS> {};
template <> struct Kernel<QType::IQ2_XS> : KernelGrid<PackedIQ2XS> {};
template <> struct Kernel<QType::IQ2_S> : KernelGrid<PackedIQ2S> {};
template <> struct Kernel<QType::IQ3_XXS> : KernelGrid<PackedIQ3XXS> {};
template <> struct Kernel<QType::IQ3_S> : KernelGrid<PackedIQ3S> {};
template <> struct Kernel<QType::IQ1_S> : KernelGrid<PackedIQ1S> {};
template <> struct Kernel<QType::IQ1_M> : KernelGrid<PackedIQ1M> {};

// Calls task(P{}) for the packed form of a type with a grid; does nothing for other types.
template <class Task> inline void with_grid(QType type, const Task& task) {
  with_format(type, [&](auto format) {
    using F = decltype(format);
    if constexpr (is_staged(F::info)) {
      static_assert(kIsPackedAsSaid<F>);
      task(typename Kernel<F::type>::Packed{});
    }
  });
}

template <class P> constexpr bool kHasGrid = false;
template <class FORMAT, GridUpper UPPER, GridScales SCALES>
constexpr bool kHasGrid<PackedGrid<FORMAT, UPPER, SCALES>> = true;

// ---- looking up ----

// What stands in a line of nibbles for part s.
inline wb grid_nibbles(const uint8_t* line, int s) { return bits_from(load_wb(line + 64 * (s / 2)), s % 2 * 4, 15); }

// The upper bits of 64 codes, line `m` of part s.
template <class P> inline wb grid_upper(const uint8_t* p, int s, int m) {
  const uint8_t* at = p + P::upper_at;
  if constexpr (P::upper == GridUpper::LastSign) return bits_from(load_wb(p + P::part_bytes * s + 64), 7, 1);
  if constexpr (P::upper == GridUpper::Two) return bits_from(load_wb(at + 64 * (s / 4)), s % 4 * 2, 3);
  if constexpr (P::upper == GridUpper::One) return bits_from(load_wb(at + 64 * m), s, 1);
  return bits_from(load_wb(at + 64 * (s / 2)), s % 2 * 4, 7);
}

// 64 codes, 4 of each row, to lines of entries of 16 rows.
template <class Entry, class Index> inline void look_up(const Entry* grid, const Index* codes, uint8_t* out) {
  constexpr int bytes = static_cast<int>(sizeof(Entry));
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      size_t code = codes[4 * r + j];
      asm("" : "+r"(code));  // keeps compilers from gathers
      std::memcpy(out + (16 * j + r) * bytes, grid + code, sizeof(Entry));
    }
}

// Values of part s, unsigned or 8 times those of IQ1: entries of 16 rows, code by code.
template <class P> inline void look_up_part(const uint8_t* p, int s, uint8_t* w) {
  const auto* grid = grid_of(typename P::Format{}).entries;
  for (int m = 0; m < P::code_bytes / 64; ++m) {
    const uint8_t* codes = p + P::part_bytes * s + 64 * m;
    uint8_t* out = w + 256 * m;
    if constexpr (P::upper == GridUpper::None) {
      look_up(grid, codes, out);
    } else {
      alignas(64) uint16_t wide[64];
      store_pairs_of_bytes(load_wb(codes), grid_upper<P>(p, s, m), wide);
      look_up(grid, wide, out);
    }
  }
}

// ---- signs and scales ----

// Replaces bit 7 of a byte by the parity of the others.
struct ParityTables {
  uint8_t low[16], high[16];
  constexpr ParityTables() : low(), high() {
    for (int i = 0; i < 16; ++i) {
      const int odd = (i ^ i >> 1 ^ i >> 2 ^ i >> 3) & 1;
      low[i] = static_cast<uint8_t>(odd << 7);
      high[i] = low[i];  // with bit 3, which is to go: its own parity takes it away
    }
  }
};
constexpr ParityTables kParity;
inline wb with_parity(wb x) {
  return xor_bytes(x, xor_bytes(lookup16(low_nibbles(x), kParity.low), lookup16(high_nibbles(x), kParity.high)));
}

// The delta of a nibble whose last bit is set for minus, as bytes with `flip`.
struct DeltaTable {
  uint8_t v[16];
  constexpr explicit DeltaTable(uint8_t flip) : v() {
    for (int i = 0; i < 16; ++i) v[i] = static_cast<uint8_t>((i < 8 ? 1 : 255) ^ flip);
  }
};
template <uint8_t FLIP> constexpr DeltaTable kDelta{FLIP};

// Values less than 128 of a part of 8 lines, now with signs, byte j those of columns 8 j .. 8 j + 7, and `FLIP`.
template <uint8_t FLIP, int J = 0> inline void sign_lines(wb x, uint8_t* w) {
  if constexpr (J < 4) {
    const wb signs = spread_byte<J>(x);
    store_wb(w + 128 * J, negate_bytes<0, FLIP>(load_wb(w + 128 * J), signs));
    store_wb(w + 128 * J + 64, negate_bytes<4, FLIP>(load_wb(w + 128 * J + 64), signs));
    sign_lines<FLIP, J + 1>(x, w);
  }
}

// Lines 2 J and 2 J + 1 of a part as they were looked up, now with signs (or delta) and `FLIP`. x: see grid_signs.
template <class P, uint8_t FLIP, int J> inline void finish_lines(wb x, wb first, wb second, uint8_t* w) {
  if constexpr (P::spec.has_delta) {
    const wb delta = lookup16(spread_byte<(P::scales == GridScales::Nibble ? 3 : J)>(x), kDelta<FLIP>.v);
    first = add_bytes(first, delta);
    second = add_bytes(second, delta);
  } else {
    const wb signs = spread_byte<J>(x);
    first = negate_bytes<0, FLIP>(first, signs);
    second = negate_bytes<4, FLIP>(second, signs);
  }
  store_wb(w + 128 * J, first);
  store_wb(w + 128 * J + 64, second);
}

// Signs of part s as bytes of 8, or the nibbles with its deltas.
template <class P> inline wb grid_signs(const uint8_t* p, int s) {
  if constexpr (P::spec.has_delta) return grid_nibbles(p + P::upper_at, s);
  const wb x = load_wb(p + P::part_bytes * s + P::code_bytes);
  return P::has_last_sign ? x : with_parity(x);
}

// One bit of each of a row's four bytes as a number, the first the lowest.
template <int BIT> inline vi four_bits(wb x) {
  const vi bits = andi(sar<BIT>(lanes_of(x)), set1i(0x01010101));
  return andi(sar<24>(add_times(set1i(0), bits, set1i(0x01020408))), set1i(15));
}
inline void store_odd(int32_t* out, vi scale) { storei(out, addi(addi(scale, scale), set1i(1))); }

// 2 s + 1 of the sub-blocks of part s: 16 numbers, or 32.
template <class P> inline void store_grid_scales(const uint8_t* p, int s, int32_t* out) {
  if constexpr (P::scales == GridScales::LastSigns) {
    store_odd(out, four_bits<7>(load_wb(p + P::part_bytes * s + P::code_bytes)));
  } else if constexpr (P::scales == GridScales::Nibble) {
    store_odd(out, andi(four_bits<3>(grid_nibbles(p + P::upper_at, s)), set1i(7)));
  } else if constexpr (P::spec.subs == 16) {
    const vi pair = load_s8(p + P::scales_at + 16 * s);
    store_odd(out, andi(pair, set1i(15)));
    store_odd(out + 16, andi(sar<4>(pair), set1i(15)));
  } else {
    const vi pair = load_s8(p + P::scales_at + 16 * (s / 2));
    store_odd(out, andi(s % 2 == 0 ? pair : sar<4>(pair), set1i(15)));
  }
}

// Part s of a block as 8 lines of int8 with `FLIP`; to be called after look_up_part.
template <class P, uint8_t FLIP, int J = 0> inline void finish_part(const uint8_t* p, int s, uint8_t* w) {
  if constexpr (J < 4) {
    wb first = load_wb(w + 128 * J), second = load_wb(w + 128 * J + 64);
    if constexpr (P::spec.cols == 8) split_pairs(first, second, &first, &second);
    finish_lines<P, FLIP, J>(grid_signs<P>(p, s), first, second, w);
    finish_part<P, FLIP, J + 1>(p, s, w);
  }
}

struct GridStage {
  alignas(64) uint8_t w[kTileCols * 16];  // lines
  alignas(64) int32_t sc[16 * 16];        // [sub-block][row]
};

template <class P> inline void prefetch_part(const uint8_t* p, int s) {
  constexpr int lines = static_cast<int>(P::bytes / 64);
  for (int l = lines * s / 8; l < lines * (s + 1) / 8; ++l) prefetch_line(p + kAheadPacked + 64 * l);
}

}  // namespace

#include "kernels/packed/trellis.inl"

#if defined(__AVX512BW__)
#include "kernels/packed/grid_vbmi.inl"
#elif defined(__AVX2__)
#include "kernels/packed/grid_narrow.inl"
#endif

namespace {

// All parts are looked up before the first is finished, which reads in wide loads what was stored in narrow ones.
template <class P, uint8_t FLIP, bool IN_STREAM = true>
inline void stage_grid(const uint8_t* p, GridStage& st, [[maybe_unused]] bool has_vbmi) {
  if constexpr (kIsTrellis<P>) {
    for (int s = 0; s < 8; ++s) {
      if constexpr (IN_STREAM) prefetch_part<P>(p, s);
      store_trellis_part<P, FLIP>(p, s, st.w + 512 * s);
      store_trellis_scales<P>(p, s, st.sc + 16 * s);
    }
  } else {
#if defined(__AVX512BW__)
    if (has_vbmi) return stage_grid_vbmi<P, FLIP, IN_STREAM>(p, st);
#endif
    for (int s = 0; s < 8; ++s) {
      if constexpr (IN_STREAM) prefetch_part<P>(p, s);
      look_up_part<P>(p, s, st.w + 512 * s);
    }
    for (int s = 0; s < 8; ++s) {
      finish_part<P, FLIP>(p, s, st.w + 512 * s);
      store_grid_scales<P>(p, s, st.sc + 2 * P::spec.subs * s);
    }
  }
}

// Part s alone: 8 lines of value + 128, and one or two scales of 16 rows.
template <class P> inline void stage_part(const uint8_t* p, int s, uint8_t* w, int32_t* scales) {
  if constexpr (kIsTrellis<P>) {
    store_trellis_part<P, 0x80>(p, s, w);
    store_trellis_scales<P>(p, s, scales);
  } else {
    look_up_part<P>(p, s, w);
    finish_part<P, 0x80>(p, s, w);
    store_grid_scales<P>(p, s, scales);
  }
}

// ---- products ----

template <int SUBS, int C> void grid_tokens(const TileArgs& a, const GridStage& st, vf d, int64_t b, int t) {
  constexpr int steps = 64 / SUBS;
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    const int16_t* sums[C];
    vi total[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + 256 * b;
      sums[c] = a.act.sums + row * a.act.lds + kSumsPerSuper * b + (SUBS == 8 ? 16 : 0);
      total[c] = set1i(0);
    }
    for (int s = 0; s < SUBS; ++s) {
      vi isum[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) isum[c] = sdot_init(sums[c][s]);
#pragma GCC unroll 8
      for (int i = 0; i < steps; ++i) {
        const wb w = load_wb(st.w + 64 * (steps * s + i));
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = sdot(isum[c], w, y[c] + 4 * (steps * s + i));
      }
      const vi scale = loadi(st.sc + 16 * s);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) total[c] = add_times(total[c], isum[c], scale);
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vf da = set1(a.act.d[token_row(a, t + c) * a.act.ldd + b]);
      store(a.acc + (t + c) * 16, add(load(a.acc + (t + c) * 16), mul(mul(d, da), to_float(total[c]))));
    }
  }
  if constexpr (C > 1) grid_tokens<SUBS, fewer(C)>(a, st, d, b, t);
}

template <class P> inline vf grid_d(const uint8_t* tile, int64_t b) {
  if constexpr (kIsTrellis<P>) return super_d<P>(tile, nullptr, b);
  return mul(block_d(tile, b), set1(P::spec.factor));
}

template <class P> void grid_tile(const TileArgs& a, bool has_vbmi) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  if constexpr (!kIsTrellis<P>) return grid_narrow_tile<P>(a);
#endif
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  GridStage st;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    stage_grid<P, kSignFlip>(p, st, has_vbmi);
    grid_tokens<P::spec.subs, kQuantTokens>(a, st, grid_d<P>(a.packed, b), b, 0);
  }
}

void packed_grid_tile(const TileArgs& a, bool has_vbmi) {
  with_grid(a.type, [&](auto form) { grid_tile<decltype(form)>(a, has_vbmi); });
}

// ---- packing ----

// Codes of part s: bytes, and what is above them.
template <class P> void pack_grid_codes(const GridBlock* rows, int s, uint8_t* out) {
  constexpr int codes = 32 / P::spec.cols;
  uint8_t *part = out + P::part_bytes * s, *above = out + P::upper_at;
  for (int i = 0; i < 16 * codes; ++i) {
    const int code = rows[i % 64 / 4].codes[codes * s + i / 64 * 4 + i % 4], upper = code >> 8;
    const auto place = [upper](uint8_t& byte, int shift) { byte = static_cast<uint8_t>(byte | upper << shift); };
    part[i] = static_cast<uint8_t>(code & 255);
    if constexpr (P::upper == GridUpper::LastSign) place(part[64 + i], 7);
    if constexpr (P::upper == GridUpper::Two) place(above[64 * (s / 4) + i], s % 4 * 2);
    if constexpr (P::upper == GridUpper::One) place(above[i], s);
    if constexpr (P::upper == GridUpper::Nibble) place(above[64 * (s / 2) + i], s % 2 * 4);
  }
}

// Signs, or deltas, and scales of part s of row r.
template <class P> void pack_grid_row(const GridBlock& row, int s, int r, uint8_t* out) {
  const auto place = [](uint8_t& byte, int bits) { byte = static_cast<uint8_t>(byte | bits); };
  for (int j = 0; j < 4; ++j) {
    const int scale_bit = j < 3 || !P::spec.has_delta ? row.scales[s] >> j & 1 : row.deltas[4 * s];
    if constexpr (P::spec.has_delta) {
      const int bit = P::scales == GridScales::Nibble ? scale_bit : row.deltas[4 * s + j];
      place(out[P::upper_at + 64 * (s / 2) + 4 * r + j], bit << (3 + s % 2 * 4));
    } else {
      uint8_t& byte = out[P::part_bytes * s + P::code_bytes + 4 * r + j];
      place(byte, row.signs[4 * s + j] & (P::has_last_sign ? 255 : 127));
      if constexpr (P::scales == GridScales::LastSigns) place(byte, scale_bit << 7);
    }
  }
  if constexpr (P::scales == GridScales::Bytes)
    for (int i = s * P::spec.subs / 8; i < (s + 1) * P::spec.subs / 8; ++i)
      place(out[P::scales_at + 16 * (i / 2) + r], row.scales[i] << (i % 2 * 4));
}

template <class P> void pack_grid_tile(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  using Format = typename P::Format;
  const int64_t blocks = k / 256, head = head_bytes(blocks);
  std::memset(out, 0, static_cast<size_t>(head + blocks * P::bytes));
  GridBlock read[16] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* block = out + head + b * P::bytes;
    for (int r = 0; r < 16; ++r) {
      Format::read(rows[r] + b * Format::bytes, read[r]);
      std::memcpy(out + 32 * b + 2 * r, read[r].d, 2);
    }
    for (int s = 0; s < 8; ++s) {
      pack_grid_codes<P>(read, s, block);
      for (int r = 0; r < 16; ++r) pack_grid_row<P>(read[r], s, r, block);
    }
  }
}

void pack_grid(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  with_grid(type, [&](auto form) { KernelGrid<decltype(form)>::pack(rows, k, out); });
}

// For rows in block layout, as tile_by_blocks in dispatch.inl.
void grid_rows_tile(const TileArgs& a) {
  with_grid(a.type, [&](auto form) {
    using P = decltype(form);
    constexpr int head = kRowHead<typename P::F>;
    alignas(64) uint8_t room[kHeadAlign + P::bytes];
    for (int64_t b = 0; b < a.k / 256; ++b) {
      uint8_t joined[kTileRows][head + P::Format::bytes];  // as rows of one block
      const uint8_t* rows[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        std::memcpy(joined[r], a.rows[r], head);
        std::memcpy(joined[r] + head, a.rows[r] + head + b * P::Format::bytes, P::Format::bytes);
        rows[r] = joined[r];
      }
      KernelGrid<P>::pack(rows, 256, room);
      GridStage st;
      stage_grid<P, kSignFlip, false>(room + kHeadAlign, st, kHasVbmi);
      grid_tokens<P::spec.subs, kQuantTokens>(a, st, grid_d<P>(room, 0), b, 0);
    }
  });
}

}  // namespace
