// Types with grids in tiers with 16 registers of 32 bytes (simd/avx2.h). Included by packed/grid.inl, whose form and
// results these are; integers are exact, so that their order does not matter.
//
// A register holds 8 columns of 4 rows, as entries of the grids do, so that nothing is taken apart: register (j, h, k)
// of a part has columns 8 j .. 8 j + 7 of rows r, r + 1 in its lower and r + 4, r + 5 in its upper half, for r = 8 h +
// 2 k. So a permutation within halves takes what belongs to its rows out of a line of 16 rows with 4 bytes each. A row
// has two sums of int32, which are added in the end.
//
// One or two tokens are multiplied with what is looked up while it is in registers: the values without signs, and the
// signs with the activations, in place of the values'. For more tokens the values are stored first, with an offset that
// makes them unsigned: it is taken out by sums of the activations, as the minima of K-quants are.

namespace {

constexpr int kGridPart = 16;  // registers of a part: (j, h, k) is number 4 j + 2 h + k

// For permutations within halves, both alike.
struct GridPatterns {
  alignas(32) uint8_t rows[4][2][32];  // [j][k]: byte j of a row's four, for all of its columns
  alignas(32) uint8_t scales[2][32];   // [k]: a row's int32 as grid_scale, as often as there is room
  constexpr GridPatterns() : rows(), scales() {
    for (int k = 0; k < 2; ++k)
      for (int i = 0; i < 32; ++i) {
        const int row = 2 * k + i % 16 / 8;
        for (int j = 0; j < 4; ++j) rows[j][k][i] = static_cast<uint8_t>(4 * row + j);
        scales[k][i] = static_cast<uint8_t>(4 * row + i % static_cast<int>(sizeof(grid_scale)));
      }
  }
};
constexpr GridPatterns kGridPatterns;

// What is added to a value that is stored: such that it is unsigned, and that a product of two columns fits in an
// int16.
template <class P> constexpr int kGridOffset = 64;
template <> constexpr int kGridOffset<PackedIQ3S> = 16;  // values to 15
template <> constexpr int kGridOffset<PackedIQ1S> = 9;
template <> constexpr int kGridOffset<PackedIQ1M> = 9;

// Registers of a part with one scale that a sum takes: of values with offset, and of those without, which are 62 at
// most. In int16, 2 x 2 x 62 x 127 = 31496 is the most.
template <class P> constexpr int kScaledAtOnce = 32 / P::spec.subs;
template <class P> constexpr int kStoredSteps = kNarrowSums && kGridOffset<P> == 64 ? 1 : kScaledAtOnce<P>;
template <class P> constexpr int kFewSteps = kNarrowSums ? 2 : kScaledAtOnce<P>;

// ---- looking up ----

inline __m256i half_of(wb x, int h) { return h == 0 ? x.a : x.b; }

inline __m128i two_entries(const uint64_t* first, const uint64_t* second) {
  const __m128d low = _mm_load_sd(reinterpret_cast<const double*>(first));
  return _mm_castpd_si128(_mm_loadh_pd(low, reinterpret_cast<const double*>(second)));
}
// Four entries of 4 bytes. Loads that begin where the wanted entry comes to lie in its place take one instruction with
// the blend, on any port; Grid has room in front of its entries and behind them.
inline __m128i four_entries(const uint32_t* grid, size_t a, size_t b, size_t c, size_t d) {
  const auto at = [grid](size_t code, int place) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(grid + code - place));
  };
  return _mm_blend_epi32(_mm_blend_epi32(_mm_blend_epi32(at(a, 0), at(b, 1), 2), at(c, 2), 4), at(d, 3), 8);
}

// The codes, in line m of a part, of row `i` of four of registers (.., h, k): as bytes as they are packed, or as
// GridReads puts them.
inline const uint8_t* row_codes(const uint8_t* codes, int m, int h, int k, int i) {
  return codes + 64 * m + 4 * (8 * h + 4 * (i / 2) + 2 * k + i % 2);
}
inline const uint16_t* row_codes(const uint16_t* codes, int m, int h, int k, int i) {
  return codes + 64 * m + 16 * (2 * h + k) + 4 * i;
}

// The entries of register (j, h, k).
template <class P, class Entry, class Index>
inline __m256i grid_entries(const Entry* grid, const Index* codes, int j, int h, int k) {
  __m128i half[2];
  for (int i = 0; i < 2; ++i) {
    const int m = P::spec.cols == 8 ? 0 : j / 2, at = P::spec.cols == 8 ? j : j % 2 * 2;
    const Index *first = row_codes(codes, m, h, k, 2 * i) + at, *second = row_codes(codes, m, h, k, 2 * i + 1) + at;
    if constexpr (P::spec.cols == 8)
      half[i] = two_entries(grid + first[0], grid + second[0]);
    else
      half[i] = four_entries(grid, first[0], first[1], second[0], second[1]);
  }
  return _mm256_inserti128_si256(_mm256_castsi128_si256(half[0]), half[1], 1);
}

// Compilers would reach this by long displacements from elsewhere, and processors decode fewer such instructions.
template <class T> inline T* in_register(T* p) {
  asm("" : "+r"(p));
  return p;
}

// What is read of a block before its entries are looked up, so that nothing waits for what was stored last.
template <class P> struct GridReads {
  static constexpr int lines = static_cast<int>(P::code_bytes / 64);            // of a part's codes
  alignas(64) uint16_t codes[P::upper == GridUpper::None ? 1 : 8][64 * lines];  // those with upper bits
  alignas(64) int32_t scales[16 * P::spec.subs];                                // [sub-block][row]

  explicit GridReads(const uint8_t* p) {
    for (int s = 0; s < 8; ++s) store_grid_scales<P>(p, s, scales + 2 * P::spec.subs * s);
    if constexpr (P::upper != GridUpper::None)
      for (int s = 0; s < 8; ++s)
        for (int m = 0; m < lines; ++m)
          put_together(load_wb(p + P::part_bytes * s + 64 * m), grid_upper<P>(p, s, m), codes[s] + 64 * m);
  }
  // Halves of registers become rows r, r + 1 and r + 4, r + 5.
  static void put_together(wb low, wb high, uint16_t* out) {
    for (int h = 0; h < 2; ++h) {
      auto* to = reinterpret_cast<__m256i*>(out + 32 * h);
      _mm256_store_si256(to, _mm256_unpacklo_epi8(half_of(low, h), half_of(high, h)));
      _mm256_store_si256(to + 1, _mm256_unpackhi_epi8(half_of(low, h), half_of(high, h)));
    }
  }
  auto part(const uint8_t* p, int s) const {
    if constexpr (P::upper == GridUpper::None)
      return in_register(p + P::part_bytes * s);
    else
      return in_register(static_cast<const uint16_t*>(codes[s]));
  }
};

inline __m256i take_rows(__m256i x, const uint8_t* pattern) {
  return _mm256_shuffle_epi8(x, _mm256_load_si256(reinterpret_cast<const __m256i*>(pattern)));
}

// -1 for every column that is negative. x: bytes of 8 signs, as grid_signs has them.
inline __m256i grid_minus(__m256i x, int j, int k) {
  const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(take_rows(x, kGridPatterns.rows[j][k]), bits), bits);
}

// The values of IQ1 + kGridOffset. x: nibbles, whose last bit is set where the delta is -1.
template <class P> inline __m256i with_delta(__m256i entries, __m256i x, int j, int k) {
  const int from = P::scales == GridScales::Nibble ? 3 : j;
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(10, 10, 10, 10, 10, 10, 10, 10, 8, 8, 8, 8, 8, 8, 8, 8));
  return _mm256_add_epi8(entries, _mm256_shuffle_epi8(table, take_rows(x, kGridPatterns.rows[from][k])));
}

// The scales of the rows of registers (.., h, k), which multiply pairs of columns.
inline __m256i grid_row_scales(const int32_t* scales, int h, int k) {
  return take_rows(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales + 8 * h)), kGridPatterns.scales[k]);
}

inline __m256i eight_columns(const int8_t* y) {
  int64_t columns;
  std::memcpy(&columns, y, 8);
  return _mm256_set1_epi64x(columns);
}

// The sums of 16 rows. totals: [2 h + k].
inline vi grid_row_sums(const __m256i* totals) {
  return {_mm256_hadd_epi32(totals[0], totals[1]), _mm256_hadd_epi32(totals[2], totals[3])};
}

// sums - kGridOffset * low.
template <class P> inline vi without_offset(vi sums, vi low) {
  if constexpr (kGridOffset<P> == 64) return subi(sums, shl<6>(low));
  if constexpr (kGridOffset<P> == 16) return subi(sums, shl<4>(low));
  return subi(subi(sums, shl<3>(low)), low);
}

// ---- one or two tokens ----

// Products of registers (j, h, k) to (j + STEPS - 1, h, k) with C tokens, to totals[c][2 h + k].
template <class P, int C, class Entry, class Index>
inline void few_columns(const Entry* grid, const Index* codes, wb x, int j, int h, int k, const int8_t* const* y,
                        __m256i scale, __m256i (*totals)[4]) {
  __m256i sums[C] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kFewSteps<P>; ++i) {
    __m256i w = grid_entries<P>(grid, codes, j + i, h, k), signs = {};
    if constexpr (P::spec.has_delta)
      w = with_delta<P>(w, half_of(x, h), j + i, k);
    else
      signs = _mm256_or_si256(grid_minus(half_of(x, h), j + i, k), _mm256_set1_epi8(1));
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      __m256i columns = eight_columns(y[c] + 8 * (j + i));
      if constexpr (!P::spec.has_delta) columns = _mm256_sign_epi8(columns, signs);
      sums[c] = add_grid(sums[c], w, columns);
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) totals[c][2 * h + k] = _mm256_add_epi32(totals[c][2 * h + k], scale_grid(sums[c], scale));
}

// Part s, of the block's columns y. low: see without_offset, of types with deltas.
template <class P, int C>
inline void few_part(const GridReads<P>& reads, const uint8_t* p, int s, const int8_t* const* y,
                     const int16_t* const* sums, __m256i (*totals)[4], vi* low) {
  constexpr int subs = P::spec.subs / 8;
  prefetch_part<P>(p, s);
  const auto* grid = in_register(grid_of(typename P::Format{}).entries);
  const auto* codes = reads.part(p, s);
  const int32_t* scales = reads.scales + 16 * subs * s;
  const wb x = grid_signs<P>(p, s);
#pragma GCC unroll 4
  for (int hk = 0; hk < 4; ++hk) {
    __m256i scale = grid_row_scales(scales, hk / 2, hk % 2);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j += kFewSteps<P>) {
      if (subs == 2 && j == 2) scale = grid_row_scales(scales + 16, hk / 2, hk % 2);
      few_columns<P, C>(grid, codes, x, j, hk / 2, hk % 2, y, scale, totals);
    }
  }
  if constexpr (P::spec.has_delta)
    for (int c = 0; c < C; ++c)  // the upper halves of scales are zero, so that the second of a pair does not count
      for (int i = 0; i < subs; ++i) low[c] = pair_dot(low[c], loadi(scales + 16 * i), sums[c] + subs * s + i);
}

template <class P, int C> void grid_few(const TileArgs& a, int t) {
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
    sums[c] = a.act.sums + row * a.act.lds + (P::spec.subs == 8 ? 16 : 0);
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    __m256i totals[C][4];
    vi low[C];
    for (int c = 0; c < C; ++c) {
      low[c] = set1i(0);
      for (__m256i& total : totals[c]) total = _mm256_setzero_si256();
    }
    const GridReads<P> reads(p);
    for (int s = 0; s < 8; ++s) {
      few_part<P, C>(reads, p, s, y, sums, totals, low);
      for (int c = 0; c < C; ++c) y[c] += 32;
    }
    const vf d = mul(block_d(a.packed, b), set1(P::spec.factor));
    for (int c = 0; c < C; ++c) {
      vi isum = grid_row_sums(totals[c]);
      if constexpr (P::spec.has_delta) isum = without_offset<P>(isum, low[c]);
      acc[c] = add(acc[c], mul(mul(d, set1(da[c][b])), to_float(isum)));
      sums[c] += kSumsPerSuper;
    }
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

// ---- more tokens ----

struct GridBytes {
  alignas(32) uint8_t w[8 * kGridPart * 32];  // of every part: registers (j, h, k), values with kGridOffset
  alignas(32) grid_scale scales[16][4][32 / sizeof(grid_scale)];  // [sub-block][2 h + k]
  alignas(32) int32_t pairs[8][16];                               // [sub-blocks 2 i and 2 i + 1][row]
};

template <class P> inline void store_grid_part(const GridReads<P>& reads, const uint8_t* p, int s, GridBytes& st) {
  constexpr int subs = P::spec.subs / 8;
  const auto* grid = in_register(grid_of(typename P::Format{}).entries);
  const auto* codes = reads.part(p, s);
  const int32_t* scales = reads.scales + 16 * subs * s;
  for (int i = 0; i < subs; ++i) {
    const int sub = subs * s + i;
    for (int hk = 0; hk < 4; ++hk)
      _mm256_store_si256(reinterpret_cast<__m256i*>(st.scales[sub][hk]),
                         grid_row_scales(scales + 16 * i, hk / 2, hk % 2));
    const vi scale = loadi(scales + 16 * i);
    storei(st.pairs[sub / 2], sub % 2 == 0 ? scale : ori(loadi(st.pairs[sub / 2]), shl<16>(scale)));
  }
  const wb x = grid_signs<P>(p, s);
  uint8_t* out = st.w + 32 * kGridPart * s;
#pragma GCC unroll 16
  for (int n = 0; n < kGridPart; ++n) {
    const int j = n / 4, h = n / 2 % 2, k = n % 2;
    __m256i w = grid_entries<P>(grid, codes, j, h, k);
    if constexpr (P::spec.has_delta) {
      w = with_delta<P>(w, half_of(x, h), j, k);
    } else {
      const __m256i minus = grid_minus(half_of(x, h), j, k);
      w = _mm256_sub_epi8(_mm256_xor_si256(w, minus), _mm256_sub_epi8(minus, _mm256_set1_epi8(kGridOffset<P>)));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + 32 * n), w);
  }
}

template <class P> inline void store_grid(const uint8_t* p, GridBytes& st) {
  const GridReads<P> reads(p);
  for (int s = 0; s < 8; ++s) {
    prefetch_part<P>(p, s);
    store_grid_part<P>(reads, p, s, st);
  }
}

// Part s: C tokens, whose columns are y.
template <class P, int C>
inline void stored_part(const GridBytes& st, int s, const int8_t* const* y, __m256i (*totals)[4]) {
  constexpr int subs = P::spec.subs / 8, steps = kStoredSteps<P>;
  const uint8_t* w = st.w + 32 * kGridPart * s;
#pragma GCC unroll 4
  for (int j = 0; j < 4; j += steps) {
    const auto& scales = st.scales[subs * s + subs * j / 4];
    __m256i columns[C][steps];
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < steps; ++i) columns[c][i] = eight_columns(y[c] + 8 * (j + i));
#pragma GCC unroll 4
    for (int hk = 0; hk < 4; ++hk) {
      __m256i sums[C] = {};
#pragma GCC unroll 4
      for (int i = 0; i < steps; ++i) {
        const __m256i weights = load32(w + 32 * (4 * (j + i) + hk));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c] = add_grid(sums[c], weights, columns[c][i]);
      }
      const __m256i scale = load32(scales[hk]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) totals[c][hk] = _mm256_add_epi32(totals[c][hk], scale_grid(sums[c], scale));
    }
  }
}

template <class P, int C> void stored_tokens(const TileArgs& a, const GridBytes& st, vf d, int64_t b, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    __m256i totals[C][4];
    for (int c = 0; c < C; ++c) {
      y[c] = a.act.q + token_row(a, t + c) * a.act.ldq + 256 * b;
      for (__m256i& total : totals[c]) total = _mm256_setzero_si256();
    }
    for (int s = 0; s < 8; ++s) {
      stored_part<P, C>(st, s, y, totals);
      for (int c = 0; c < C; ++c) y[c] += 32;
    }
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      const int16_t* sums = a.act.sums + row * a.act.lds + kSumsPerSuper * b + (P::spec.subs == 8 ? 16 : 0);
      vi low = set1i(0);
      for (int i = 0; i < P::spec.subs / 2; ++i) low = pair_dot(low, loadi(st.pairs[i]), sums + 2 * i);
      const vi isum = without_offset<P>(grid_row_sums(totals[c]), low);
      float* acc = a.acc + (t + c) * 16;
      store(acc, add(load(acc), mul(mul(d, set1(a.act.d[row * a.act.ldd + b])), to_float(isum))));
    }
  }
  if constexpr (C > 1) stored_tokens<P, C - 1>(a, st, d, b, t);
}

constexpr int kGridTokens = 2;  // with 8 sums, as many as the registers hold

template <class P> void grid_narrow_tile(const TileArgs& a) {
  if (a.num_tokens == 1) return grid_few<P, 1>(a, 0);
  if (a.num_tokens == 2) return grid_few<P, 2>(a, 0);
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  GridBytes st;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    store_grid<P>(p, st);
    stored_tokens<P, kGridTokens>(a, st, mul(block_d(a.packed, b), set1(P::spec.factor)), b, 0);
  }
}

}  // namespace
