// Super-blocks of signed values, which codes look up: IQ4_XS and, of ik_llama.cpp, IQ4_K and IQ5_K. How they lie in
// rows and in tiles, and their products with few tokens. Included by a tier file after packing.inl. Blocks in rows:
//   IQ4_XS 136 B / 256: half d; 6-bit sc[8] in 2 + 4 B; nibbles qs[128]                   w = d (sc - 32) table[q]
//   IQ4_K  144 B / 256: half d; a bit b for every 16 weights in 2 B; 6-bit sc[16] in 4 + 8 B; nibbles qs[128]
//                                                                                   w = d (sc - 32) (table[q] + 4 b)
//   IQ5_K  176 B / 256: the same, nibbles as in Q4_K, then their fifth bits qh[32] as in Q5_K
//                                                                                   w = d (sc - 32) (table[q] + 2 b)
// and in a tile (see packed.inl), after the scales: 32 lines as Q4_K, and 8 of fifth bits as Q5_K. With the bit b a
// scale is 2 (sc - 32) + b.

namespace {

// ---- the types, one by one ----

// What they share once packed. T has values<FLIP, IS_HIGH>(p, g, i, nibbles): those of step 16 g + 8 IS_HIGH + i, with
// some bits flipped. low and high give value + 128, for tiles (amx.inl); the kernels here use signed values.
template <class T, class Layout> struct PackedSigned {
  using F = Layout;
  static constexpr int offset = 128;
  static constexpr int64_t scales = 0, minima = 0, lines = 16 * F::subs;
  // What is added to the values of sub-block 2 j + ODD, as bytes of every row; of types without b a number, not used.
  template <int ODD> static auto shift([[maybe_unused]] const uint8_t* p, [[maybe_unused]] int j) {
    if constexpr (kShiftAt<F> > 0) {
      alignas(64) int32_t pairs[16];
      storei(pairs, pairs_u8(p + scales + 32 * j));
      return move_bits<0, kShiftAt<F>>(spread_byte<2 * ODD>(load_wb(reinterpret_cast<const uint8_t*>(pairs))), 1);
    } else {
      return 0;
    }
  }
  template <class Shift> static wb shifted(wb values, [[maybe_unused]] Shift shift) {
    if constexpr (kShiftAt<F> > 0) return add_bytes(values, shift);
    return values;
  }
  template <int I> static wb low(const uint8_t* p, int g, wb line) {
    return shifted(T::template values<0x80, 0>(p, g, I, low_nibbles(line)), shift<I / 4>(p, 2 * g));
  }
  template <int I> static wb high(const uint8_t* p, int g, wb line) {
    return shifted(T::template values<0x80, 1>(p, g, I, high_nibbles(line)), shift<I / 4>(p, 2 * g + 1));
  }
};

template <class P, int C> void packed_signed_few(const TileArgs& a, int t);
template <class P> struct FewSigned {
  template <int C> static void run(const TileArgs& a, int t) { packed_signed_few<P, C>(a, t); }
};
template <class P> struct KernelSigned : Kernel256<P> {
  static void tile(const TileArgs& a) { in_few_parts<FewSigned<P>>(a); }
};

template <uint8_t FLIP> constexpr ByteTable kIq4Table(kIq4Values, FLIP);

struct FormatIQ4XS {
  static constexpr int bytes = 136, subs = 8, d_at = 0;
  static constexpr bool has_min = false;
  template <int S> static vb chunk(const uint8_t* p) { return nibbles16(p + 8 + 16 * S); }
  // 8 scales, from -32 to 31: 4 bits each in scales_l, 2 in scales_h.
  static void unpack_scales(const uint8_t* p, int8_t* scales) {
    const int upper = p[2] | p[3] << 8;
    for (int s = 0; s < 8; ++s)
      scales[s] = static_cast<int8_t>(((p[4 + s / 2] >> (s % 2 * 4) & 15) | (upper >> (2 * s) & 3) << 4) - 32);
  }
};
template <> struct Dequantizer<QType::IQ4_XS> {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    int8_t scales[8];
    unpack256<FormatIQ4XS>(p, q);
    FormatIQ4XS::unpack_scales(p, scales);
    for (int i = 0; i < 256; ++i)
      out[i] = half_to_float(p) * static_cast<float>(scales[i / 32]) * static_cast<float>(kIq4Values[q[i]]);
  }
};
struct PackedIQ4XS : PackedSigned<PackedIQ4XS, FormatIQ4XS> {
  static constexpr int upper_bits = 0;
  static constexpr int64_t bytes = 128 + 2048;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t*, int, int, wb nibbles) {
    return lookup16(nibbles, kIq4Table<FLIP>.v);
  }
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    int8_t sub_scales[8];
    FormatIQ4XS::unpack_scales(p, sub_scales);
    for (int s = 0; s < 8; ++s) pack_pair(out + scales, s, r, static_cast<uint8_t>(sub_scales[s]));
  }
};
template <> struct Kernel<QType::IQ4_XS> : KernelSigned<PackedIQ4XS> {};

// ---- of ik_llama.cpp, with a bit b for every sub-block ----

// Sub-block s: its scale, from -32 to 31 (4 bits in scales_l, 2 in scales_h), and b.
struct IqkScale { int scale, b; };
inline IqkScale iqk_scale(const uint8_t* p, int s) {
  const int low = p[8 + s / 2] >> (s % 2 * 4) & 15, high = p[4 + s / 4] >> (s % 4 * 2) & 3;
  return {(low | high << 4) - 32, p[2 + s / 8] >> (s % 8) & 1};
}
template <class F> struct IqkDequantizer {
  static void block(const uint8_t* p, float* out) {
    uint8_t q[256];
    unpack256<F>(p, q);
    const float d = half_to_float(p);
    for (int s = 0; s < 16; ++s) {
      const IqkScale sub = iqk_scale(p, s);
      const float ds = d * static_cast<float>(sub.scale);
      for (int i = 0; i < 16; ++i)
        out[16 * s + i] = ds * static_cast<float>(F::table[q[16 * s + i]] + (sub.b << kShiftAt<F>));
    }
  }
};
template <class T, class Layout> struct PackedIqk : PackedSigned<T, Layout> {
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    for (int s = 0; s < 16; ++s) {
      const IqkScale sub = iqk_scale(p, s);
      pack_pair(out + PackedSigned<T, Layout>::scales, s, r, static_cast<uint8_t>(2 * sub.scale + sub.b));
    }
  }
};

struct FormatIQ4K {
  static constexpr int bytes = 144, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq4Values;
  template <int S> static vb chunk(const uint8_t* p) { return nibbles16(p + 16 + 16 * S); }
};
template <> constexpr int kShiftAt<FormatIQ4K> = 2;
template <> struct Dequantizer<QType::IQ4_K> : IqkDequantizer<FormatIQ4K> {};
struct PackedIQ4K : PackedIqk<PackedIQ4K, FormatIQ4K> {
  static constexpr int upper_bits = 0;
  static constexpr int64_t bytes = 256 + 2048;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t*, int, int, wb nibbles) {
    return lookup16(nibbles, kIq4Table<FLIP>.v);
  }
};
template <> struct Kernel<QType::IQ4_K> : KernelSigned<PackedIQ4K> {};

constexpr int8_t kIq5Values[32] = {-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
                                   -1,   5,    11,   17,  23,  29,  36,  43,  51,  59,  68,  77,  87,  97,  109, 121};
struct FormatIQ5K {
  static constexpr int bytes = 176, subs = 16, d_at = 0;
  static constexpr bool has_min = false;
  static constexpr const int8_t* table = kIq5Values;
  template <int S> static vb chunk(const uint8_t* p) {
    const vb x = loadb(p + 16 + 32 * (S / 2)), high = loadb(p + 144);
    const vb low = S % 2 == 0 ? andb(x, 15) : shr_mask<4>(x, 15);
    if constexpr (S < 4) return orb(low, mask_shl<4 - S>(high, 1 << S));
    return orb(low, shr_mask<(S < 4 ? 0 : S - 4)>(high, 16));
  }
};
template <> constexpr int kShiftAt<FormatIQ5K> = 1;
template <> struct Dequantizer<QType::IQ5_K> : IqkDequantizer<FormatIQ5K> {};
// Values of nibbles, what makes those of codes from 16 on of them, and a mask of bits 0.
template <uint8_t FLIP> constexpr ByteTable kIq5First(kIq5Values, FLIP);
constexpr ByteTable make_iq5_change() {
  ByteTable table(kIq5Values, 0), second(kIq5Values + 16, 0);
  for (int i = 0; i < 16; ++i) table.v[i] = static_cast<uint8_t>(table.v[i] ^ second.v[i]);
  return table;
}
constexpr int8_t kOnlyFirst[16] = {-1};
constexpr ByteTable kIq5Change = make_iq5_change(), kUnlessSet(kOnlyFirst, 0);
struct PackedIQ5K : PackedIqk<PackedIQ5K, FormatIQ5K> {
  static constexpr int upper_bits = 1;
  static constexpr int64_t bytes = 256 + 2048 + 512, bits = 256 + 2048;
  template <uint8_t FLIP, int IS_HIGH> static wb values(const uint8_t* p, int g, int i, wb nibbles) {
    const wb fifth = bits_from(load_wb(p + bits + 128 * g + 64 * IS_HIGH), i, 1);
    const wb mask = lookup16(fifth, kUnlessSet.v), change = lookup16(nibbles, kIq5Change.v);
    // change & ~mask: nothing where the fifth bit is 0
    return xor_bytes(lookup16(nibbles, kIq5First<FLIP>.v), xor_bytes(mask, or_bytes(change, mask)));
  }
};
template <> struct Kernel<QType::IQ5_K> : KernelSigned<PackedIQ5K> {};

// ---- products with few tokens ----

// Sums of one sub-block in the low and of one in the high nibbles of group g: those of line FIRST and the following.
template <class P, int C, int FIRST, bool LOW, bool HIGH>
inline void signed_lines(const uint8_t* p, int g, const int8_t* const* y, const int16_t* const* sums, vi* low,
                         vi* high) {
  constexpr int subs = P::F::subs / 8, sub = FIRST / 4;  // of the nibbles of 8 lines: 1 or 2
  [[maybe_unused]] const auto low_shift = P::template shift<sub>(p, 2 * g),
                              high_shift = P::template shift<sub>(p, 2 * g + 1);
  const uint8_t* lines = p + P::lines + 512 * g;
  if constexpr (LOW && P::upper_bits > 0)
    for (int i = sub; i < 2; i += subs) prefetch_line(p + P::bits + 128 * g + 64 * i + kAheadPacked);
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    if constexpr (LOW) low[c] = sdot_init(sums[c][2 * subs * g + sub]);
    if constexpr (HIGH) high[c] = sdot_init(sums[c][2 * subs * g + subs + sub]);
  }
#pragma GCC unroll kStepUnroll
  for (int i = FIRST; i < FIRST + 8 / subs; ++i) {
    if constexpr (LOW) prefetch_line(lines + 64 * i + kAheadPacked);
    const wb line = load_wb(lines + 64 * i);
    if constexpr (LOW) {
      const wb w = P::shifted(P::template values<kSignFlip, 0>(p, g, i, low_nibbles(line)), low_shift);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) low[c] = sdot(low[c], w, y[c] + 4 * (16 * g + i));
    }
    if constexpr (HIGH) {
      const wb w = P::shifted(P::template values<kSignFlip, 1>(p, g, i, high_nibbles(line)), high_shift);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) high[c] = sdot(high[c], w, y[c] + 4 * (16 * g + 8 + i));
    }
  }
}

template <int C> inline void add_scaled_sums(vi* total, const vi* isum, vi scale) {
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) total[c] = add_times(total[c], isum[c], scale);
}

// The sub-blocks of group g that begin in line FIRST, and the following ones.
template <class P, int C, int FIRST>
inline void signed_group(const uint8_t* p, int g, const int8_t* const* y, const int16_t* const* sums, vi* total) {
  if constexpr (FIRST < 8) {
    vi low_scale, high_scale;
    if constexpr (P::F::subs == 8) {
      const vi pair = load_scales<P>(p, g);
      low_scale = lane_scale_low(pair);
      high_scale = lane_scale_high(pair);
    } else {  // as in packed_group
      const vi first = load_scales<P>(p, 2 * g), second = load_scales<P>(p, 2 * g + 1);
      low_scale = FIRST < 4 ? lane_scale_low(first) : lane_scale_high(first);
      high_scale = FIRST < 4 ? lane_scale_low(second) : lane_scale_high(second);
    }
    if constexpr (C <= kPairedTokens) {
      vi low[C], high[C];
      signed_lines<P, C, FIRST, true, true>(p, g, y, sums, low, high);
      add_scaled_sums<C>(total, low, low_scale);
      add_scaled_sums<C>(total, high, high_scale);
    } else {  // the low nibbles of all lines, then the high ones
      vi isum[C];
      signed_lines<P, C, FIRST, true, false>(p, g, y, sums, isum, isum);
      add_scaled_sums<C>(total, isum, low_scale);
      signed_lines<P, C, FIRST, false, true>(p, g, y, sums, isum, isum);
      add_scaled_sums<C>(total, isum, high_scale);
    }
    signed_group<P, C, FIRST + 64 / P::F::subs>(p, g, y, sums, total);
  }
}

template <class P, int C> void packed_signed_few(const TileArgs& a, int t) {
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  const int8_t* y[C];
  const float* da[C];
  const int16_t* sums[C];
  vf acc[C];
  for (int c = 0; c < C; ++c) {
    const int64_t row = token_row(a, t + c);
    y[c] = a.act.q + row * a.act.ldq;
    da[c] = a.act.d + row * a.act.ldd;
    sums[c] = a.act.sums + row * a.act.lds + kSumsAt<typename P::F>;
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    vi total[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = set1i(0);
    for (int g = 0; g < 4; ++g) signed_group<P, C, 0>(p, g, y, sums, total);
    const vf d = block_d(a.packed, b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[c] = add(acc[c], mul(mul(d, set1(da[c][b])), to_float(total[c])));
      y[c] += 256;
      sums[c] += kSumsPerSuper;
    }
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

}  // namespace
