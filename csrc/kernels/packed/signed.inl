// Super-blocks of signed values, those of IQ4_XS and IQ4_K, times few tokens. Included by a tier file after packed.inl.

namespace {

// What a type adds to the values of sub-block 2 j + ODD; nothing, as a number that is not used.
template <class P, int ODD> inline auto shift_of([[maybe_unused]] const uint8_t* p, [[maybe_unused]] int j) {
  if constexpr (P::is_shifted)
    return P::template shift<ODD>(p, j);
  else
    return 0;
}

// A sub-block's codes as values, as sdot wants them.
template <class P, class Shift> inline wb signed_values(wb codes, [[maybe_unused]] Shift shift) {
  const wb values = lookup16(codes, kIq4Staged.v);
  if constexpr (P::is_shifted)
    return add_bytes(values, shift);
  else
    return values;
}

// Sums of one sub-block in the low and of one in the high nibbles of group g: those of line FIRST and the following.
template <class P, int C, int FIRST, bool LOW, bool HIGH>
inline void signed_lines(const uint8_t* p, int g, const int8_t* const* y, const int16_t* const* sums, vi* low,
                         vi* high) {
  constexpr int subs = P::F::subs / 8, sub = FIRST / 4;  // of the nibbles of 8 lines: 1 or 2
  [[maybe_unused]] const auto low_shift = shift_of<P, sub>(p, 2 * g), high_shift = shift_of<P, sub>(p, 2 * g + 1);
  const uint8_t* lines = p + P::lines + 512 * g;
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
      const wb w = signed_values<P>(low_nibbles(line), low_shift);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) low[c] = sdot(low[c], w, y[c] + 4 * (16 * g + i));
    }
    if constexpr (HIGH) {
      const wb w = signed_values<P>(high_nibbles(line), high_shift);
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
