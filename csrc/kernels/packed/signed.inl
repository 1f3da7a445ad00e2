// Super-blocks of signed values, those of IQ4_XS, times few tokens. Included by a tier file after packed.inl.

namespace {

// Sums of the low and of the high nibbles of 8 lines, those of group g.
template <int C, bool LOW, bool HIGH>
inline void signed_lines(const uint8_t* lines, int g, const int8_t* const* y, const int16_t* const* sums, vi* low,
                         vi* high) {
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    if constexpr (LOW) low[c] = sdot_init(sums[c][2 * g]);
    if constexpr (HIGH) high[c] = sdot_init(sums[c][2 * g + 1]);
  }
#pragma GCC unroll kStepUnroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (LOW) prefetch_line(lines + 64 * i + kAheadPacked);
    const wb line = load_wb(lines + 64 * i);
    if constexpr (LOW) {
      const wb w = lookup16(low_nibbles(line), kIq4Staged.v);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) low[c] = sdot(low[c], w, y[c] + 4 * (16 * g + i));
    }
    if constexpr (HIGH) {
      const wb w = lookup16(high_nibbles(line), kIq4Staged.v);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) high[c] = sdot(high[c], w, y[c] + 4 * (16 * g + 8 + i));
    }
  }
}

template <int C> inline void add_scaled_sums(vi* total, const vi* isum, vi scale) {
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) total[c] = add_times(total[c], isum[c], scale);
}

template <int C> void packed_signed_few(const TileArgs& a, int t) {
  using P = PackedIQ4XS;
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
    sums[c] = a.act.sums + row * a.act.lds + 16;
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    vi total[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = set1i(0);
    for (int g = 0; g < 4; ++g) {
      const vi pair = load_scales<P>(p, g);
      const uint8_t* lines = p + P::lines + 512 * g;
      if constexpr (C <= kPairedTokens) {
        vi low[C], high[C];
        signed_lines<C, true, true>(lines, g, y, sums, low, high);
        add_scaled_sums<C>(total, low, lane_scale_low(pair));
        add_scaled_sums<C>(total, high, lane_scale_high(pair));
      } else {  // the low nibbles of 8 lines, then the high ones
        vi isum[C];
        signed_lines<C, true, false>(lines, g, y, sums, isum, isum);
        add_scaled_sums<C>(total, isum, lane_scale_low(pair));
        signed_lines<C, false, true>(lines, g, y, sums, isum, isum);
        add_scaled_sums<C>(total, isum, lane_scale_high(pair));
      }
    }
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
