// Super-blocks of signed values, which codes look up: how they lie in tiles, their products with few tokens, and
// IQ4_XS. Included by a tier file after packing.inl; the other types are in iqk.inl. In rows:
//   IQ4_XS 136 B / 256: half d; 6-bit sc[8] in 2 + 4 B; nibbles qs[128]                   w = d (sc - 32) table[q]
// and in a tile (see packed.inl), after the scales, 32 lines as Q4_K or 16 as Q2_K (k2k3.inl), and what codes have
// above these bits as Q5_K or Q6_K.

namespace {

// ---- the types, one by one ----

// What a bit b adds to values.
template <int BY> constexpr int8_t kShiftValues[16] = {0, BY};
template <int BY> constexpr ByteTable kShifts(kShiftValues<BY>, 0);

// What they share once packed. T has values<FLIP, IS_HIGH>(p, g, i, codes): those of step 16 g + 8 IS_HIGH + i, whose
// bits in lines are `codes`, with some bits flipped. low and high give value + 128, for tiles (amx.inl); the kernels
// here use signed values.
template <class T, class Layout> struct PackedSigned {
  using F = Layout;
  static constexpr int offset = 128;
  static constexpr int64_t scales = 0, minima = 0, lines = 16 * F::subs;
  // What is added to the values of sub-block 2 j + ODD, as bytes of every row; of types without b a number, not used.
  // The bit is the lowest one of the byte that codes the scale.
  template <int ODD> static auto shift([[maybe_unused]] const uint8_t* p, [[maybe_unused]] int j) {
    if constexpr (kShiftBy<F> > 0) {
      alignas(64) int32_t pairs[16];
      storei(pairs, pairs_u8(p + scales + 32 * j));
      const wb bytes = spread_byte<2 * ODD>(load_wb(reinterpret_cast<const uint8_t*>(pairs)));
      return lookup16(move_bits<0, 0>(bytes, 1), kShifts<kShiftBy<F>>.v);
    } else {
      return 0;
    }
  }
  // Of the sub-block of step 16 g + 8 IS_HIGH + I.
  template <int I, int IS_HIGH> static auto shift_at(const uint8_t* p, int g) {
    if constexpr (F::subs == 16)
      return T::template shift<I / 4>(p, 2 * g + IS_HIGH);
    else
      return T::template shift<IS_HIGH>(p, g);
  }
  template <class Shift> static wb shifted(wb values, [[maybe_unused]] Shift shift) {
    if constexpr (kShiftBy<F> > 0) return add_bytes(values, shift);
    return values;
  }
  template <uint8_t FLIP, int IS_HIGH> static wb looked_up(const uint8_t* p, int g, int i, wb line) {
    wb codes;
    if constexpr (kGroupRun<T> == 4)
      codes = bits_from(line, 4 * IS_HIGH + i / 4 * 2, 3);
    else
      codes = IS_HIGH ? high_nibbles(line) : low_nibbles(line);
    return T::template values<FLIP, IS_HIGH>(p, g, i, codes);
  }
  template <int I> static wb low(const uint8_t* p, int g, wb line) {
    return shifted(looked_up<0x80, 0>(p, g, I, line), shift_at<I, 0>(p, g));
  }
  template <int I> static wb high(const uint8_t* p, int g, wb line) {
    return shifted(looked_up<0x80, 1>(p, g, I, line), shift_at<I, 1>(p, g));
  }
};

template <class P, int C> void packed_signed_few(const TileArgs& a, int t);
template <class P> struct FewSigned {
  template <int C> static void run(const TileArgs& a, int t) { packed_signed_few<P, C>(a, t); }
};
template <class P> void packed_signed_many(const TileArgs& a);
template <class P> struct KernelSigned : Kernel256<P> {
  static void tile(const TileArgs& a) {
    if (a.num_tokens <= kFewPacked) return in_few_parts<FewSigned<P>>(a);
    packed_signed_many<P>(a);
  }
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

// ---- products with few tokens ----

// Sums of one sub-block in the low and of one in the high nibbles of group g: those of line FIRST and the following.
template <class P, int C, int FIRST, bool LOW, bool HIGH>
inline void signed_lines(const uint8_t* p, int g, const int8_t* const* y, const int16_t* const* sums, vi* low,
                         vi* high) {
  constexpr int subs = P::F::subs / 8, sub = FIRST / 4;  // of the nibbles of 8 lines: 1 or 2
  [[maybe_unused]] const auto low_shift = P::template shift_at<FIRST, 0>(p, g),
                              high_shift = P::template shift_at<FIRST, 1>(p, g);
  if constexpr (LOW && P::upper_bits > 0)
    for (int i = sub; i < 2 * P::upper_bits; i += subs)
      prefetch_line(p + P::bits + 128 * P::upper_bits * g + 64 * i + kAheadPacked);
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    if constexpr (LOW) low[c] = sdot_init(sums[c][2 * subs * g + sub]);
    if constexpr (HIGH) high[c] = sdot_init(sums[c][2 * subs * g + subs + sub]);
  }
#pragma GCC unroll kStepUnroll
  for (int i = FIRST; i < FIRST + 8 / subs; ++i) {
    if (LOW && i < kGroupRun<P>) prefetch_line(p + P::lines + 64 * (kGroupRun<P> * g + i) + kAheadPacked);
    const wb line = group_line<P>(p, g, i);
    if constexpr (LOW) {
      const wb w = P::shifted(P::template looked_up<kSignFlip, 0>(p, g, i, line), low_shift);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) low[c] = sdot(low[c], w, y[c] + 4 * (16 * g + i));
    }
    if constexpr (HIGH) {
      const wb w = P::shifted(P::template looked_up<kSignFlip, 1>(p, g, i, line), high_shift);
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
    const vf d = super_d<P>(a.packed, p, b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[c] = add(acc[c], mul(mul(d, set1(da[c][b])), to_float(total[c])));
      y[c] += 256;
      sums[c] += kSumsPerSuper;
    }
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

// ---- with many: values are looked up once ----

template <class P, int I> inline void stage_signed_group(const uint8_t* p, int g, uint8_t* w) {
  if constexpr (I < 8) {
    const wb line = group_line<P>(p, g, I);
    prefetch_ahead<P, I, 8>(p, g);
    store_wb(w + 64 * (16 * g + I),
             P::shifted(P::template looked_up<kSignFlip, 0>(p, g, I, line), P::template shift_at<I, 0>(p, g)));
    store_wb(w + 64 * (16 * g + 8 + I),
             P::shifted(P::template looked_up<kSignFlip, 1>(p, g, I, line), P::template shift_at<I, 1>(p, g)));
    stage_signed_group<P, I + 1>(p, g, w);
  }
}

template <class P> void packed_signed_many(const TileArgs& a) {
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  GridStage st;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    for (int g = 0; g < 4; ++g) stage_signed_group<P, 0>(p, g, st.w);
    for (int j = 0; j < P::F::subs / 2; ++j) {
      const vi pair = load_scales<P>(p, j);
      storei(st.sc + 32 * j, lane_scale_low(pair));
      storei(st.sc + 32 * j + 16, lane_scale_high(pair));
    }
    grid_tokens<P::F::subs, kQuantTokens>(a, st, super_d<P>(a.packed, p, b), b, 0);
  }
}

}  // namespace
