// Super-blocks of 256 for a few tokens in a tier that sums products in int16 (simd/avx2.h). Included after packed.inl,
// whose form and results these are; what differs is how few instructions it takes with 16 registers:
//
// - The low nibbles of 8 lines are multiplied first, then the high ones, so that the sums of four tokens, the weights
//   of a step and the products fit in registers. A line is read twice, the second time from the first-level cache.
// - Q6_K is centred (kIsCentred in gemm.inl).

namespace {

// Steps I .. N - 1 of the low or the high nibbles of group g.
template <class P, int C, bool IS_HIGH, int I, int N>
inline void narrow_lines(const uint8_t* p, int g, const int8_t* const* y, uacc* sum) {
  if constexpr (I < N) {
    const wb line = group_line<P>(p, g, I);
    prefetch_ahead<P, (IS_HIGH ? 8 : 0) + I, 16>(p, g);
    const wb w = IS_HIGH ? P::template high<I>(p, g, line) : P::template low<I>(p, g, line);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) sum[c] = udot(sum[c], w, y[c] + 4 * (16 * g + (IS_HIGH ? 8 : 0) + I));
    narrow_lines<P, C, IS_HIGH, I + 1, N>(p, g, y, sum);
  }
}

// Adds steps from I on of the low or the high nibbles of group g to the totals; pairs: those of this super-block.
template <class P, int C, bool IS_HIGH, int I>
inline void narrow_half(const uint8_t* p, int g, const int8_t* const* y, const int16_t* const* pairs, vi* total) {
  using F = typename P::F;
  constexpr int sub_steps = 64 / F::subs, steps = steps_of_sum<F>();
  if constexpr (I < 8) {
    uacc sum[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
      sum[c] = kIsCentred<F> ? uacc_pair(pairs[c] + 2 * (4 * g + (IS_HIGH ? 2 : 0) + I / 4)) : uacc_zero();
    narrow_lines<P, C, IS_HIGH, I, I + steps>(p, g, y, sum);
    // Sub-blocks 2 g and 2 g + 1 of 8 steps, or 4 g + I / 4 and 4 g + 2 + I / 4 of 4 steps.
    const vi pair = load_scales<P>(p, sub_steps == 8 ? g : 2 * g + (IS_HIGH ? 1 : 0));
    const vi scale = (sub_steps == 8 ? IS_HIGH : I >= 4) ? scale_high(pair) : scale_low(pair);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = flush_scaled(total[c], sum[c], scale);
    narrow_half<P, C, IS_HIGH, I + steps>(p, g, y, pairs, total);
  }
}

template <class P, int C> void narrow256_few(const TileArgs& a, int t) {
  using F = typename P::F;
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  const int8_t* y[C];
  const float* da[C];
  const int16_t *sums[C], *pairs[C];
  for (int c = 0; c < C; ++c) {
    const int64_t row = token_row(a, t + c);
    y[c] = a.act.q + row * a.act.ldq;
    da[c] = a.act.d + row * a.act.ldd;
    sums[c] = a.act.sums + row * a.act.lds + kSumsAt<F>;
    pairs[c] = a.act.sums + row * a.act.lds + kPairSums;
  }
  float* acc = a.acc + t * 16;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    vi total[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = set1i(0);
    for (int g = 0; g < 4; ++g) {
      narrow_half<P, C, false, 0>(p, g, y, pairs, total);
      narrow_half<P, C, true, 0>(p, g, y, pairs, total);
    }
    const vf d = super_d<P>(a.packed, p, b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      vi low = set1i(0);
      if constexpr (!kIsCentred<F>)
        for (int j = 0; j < F::subs / 2; ++j) low = pair_dot(low, load_minima<P>(p, j), sums[c] + 2 * j);
      store(acc + 16 * c,
            add_super<F>(load(acc + 16 * c), d, F::has_min ? load_f16(p + 32) : zero(), set1(da[c][b]), total[c], low));
      y[c] += 256;
      sums[c] += kSumsPerSuper;
      pairs[c] += kSumsPerSuper;
    }
  }
}

}  // namespace
