// Weights packed for tiles of 16 rows, so that a step reads one stream and needs no shuffles: what a tile of gemm.inl
// stages, in the bytes of the file. Included by a tier file after gemm.inl; results are those of gemm.inl, bit by bit.
//
// A tile of 16 rows and k columns is, after a head of 16 halves d for every block (padded to 64 bytes; K-quants with a
// minimum have none), its blocks in order. A *line* is 64 bytes: 4 consecutive columns (a *step*) of 16 rows.
//
//   Q8_0   32 columns   8 lines                                                              34 B a row and block
//   Q4_0   32 columns   4 lines: low nibbles are steps 0-3, high ones steps 4-7              18 B
//   Q4_K  256 columns   d[16], dmin[16], scales, minima, 32 lines                           148 B (144 in the file)
//   Q5_K  256 columns   d[16], dmin[16], scales, minima, 32 lines, 8 lines of fifth bits    180 B (176)
//   Q6_K  256 columns   scales, 32 lines, 16 lines of upper bits                            210 B
//   MXFP4  32 columns   4 lines as Q4_0; the head holds bytes e instead of halves            17 B
//   those of formats/low.inl: packed/k2k3.inl, packed/ternary.inl, packed/small.inl; of signed values:
//   packed/signed.inl, packed/iqk.inl
//
// Lines of 256 columns: line 8 g + i holds step 16 g + i in its low and step 16 g + 8 + i in its high nibbles (g < 4).
// Fifth bits: line 2 g holds bit i of step 16 g + i in bit i, line 2 g + 1 that of step 16 g + 8 + i.
// Upper bits: line 4 g + i (i < 4) holds those of steps 16 g + i, + 4, + 8, + 12, two bits each, from the lowest up.
// Scales and minima: byte pairs of sub-blocks 2 j, 2 j + 1 of each row, 32 bytes for every j.
// FP8 has a form and an arithmetic of its own: fp8.inl. Types with grids: packed/grid.inl.

namespace {

constexpr int64_t kHeadAlign = 64;
constexpr int64_t kAheadPacked = 6144;  // bytes; the hardware's prefetcher stops at the end of each page

inline int64_t head_bytes(int64_t blocks) { return (blocks * 32 + kHeadAlign - 1) / kHeadAlign * kHeadAlign; }
inline vf block_d(const uint8_t* tile, int64_t b) { return load_f16(tile + 32 * b); }

// A table of int8 as bytes, with some bits flipped: kSignFlip as sdot wants signed weights, 0x80 as value + 128.
struct ByteTable {
  uint8_t v[16];
  constexpr ByteTable(const int8_t* values, uint8_t flip) : v() {
    for (int i = 0; i < 16; ++i) v[i] = static_cast<uint8_t>(static_cast<uint8_t>(values[i]) ^ flip);
  }
};
constexpr ByteTable kIq4Staged(kIq4Values, kSignFlip);
constexpr int8_t kQ4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr ByteTable kMxfp4Signed(kMxfp4Values, 0);
// The same + 12: unsigned, and small enough for sums in int16. The 12 is taken out by sums of the activations.
constexpr int kMxfp4Offset = 12;
constexpr ByteTable make_mxfp4_unsigned() {
  ByteTable table = kMxfp4Signed;
  for (uint8_t& value : table.v) value = static_cast<uint8_t>(value + kMxfp4Offset);
  return table;
}
constexpr ByteTable kMxfp4Unsigned = make_mxfp4_unsigned();

// ---- what differs between the formats of 256 ----

// Lines of a group of 16 steps: 8 of nibbles, or 4 of two bits each.
template <class P> constexpr int kGroupRun = 8;
template <class P> inline wb group_line(const uint8_t* p, int g, int i) {
  return load_wb(p + P::lines + 64 * (kGroupRun<P> * g + i % kGroupRun<P>));
}

// Of a type with a bit b for every sub-block: what the bit adds to its values (signed.inl).
template <class F> constexpr int kShiftBy = 0;
// Of a type with one scale for a whole row: the bytes in front of a row's blocks. A tile's head has it as fp32.
template <class F> constexpr int kRowHead = 0;
template <int BYTES> inline float row_scale(const uint8_t* row) {
  if constexpr (BYTES == 2) return half_to_float(row);
  float d;
  std::memcpy(&d, row, 4);
  return d;
}

// A packed type says
//   upper_bits                the bits of a code above its nibble: 0, 1 or 2, which are lines of their own at `bits`
//   pack_scales(p, r, out)    puts the scales of block p of row r where they are in a packed block
//   low<I>, high<I>           the codes of steps 16 g + I and 16 g + 8 + I
inline void pack_pair(uint8_t* out, int sub, int r, uint8_t value) { out[sub / 2 * 32 + 2 * r + sub % 2] = value; }

struct PackedQ4K {
  using F = FormatQ4K;
  static constexpr int upper_bits = 0;
  static constexpr int64_t bytes = 64 + 128 + 128 + 2048, scales = 64, minima = 192, lines = 320;
  template <int I> static wb low(const uint8_t*, int, wb line) { return low_nibbles(line); }
  template <int I> static wb high(const uint8_t*, int, wb line) { return high_nibbles(line); }
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    const KScales ks = unpack_scales(p + 4);
    for (int s = 0; s < 8; ++s) pack_pair(out + scales, s, r, ks.sc[s]);
    for (int s = 0; s < 8; ++s) pack_pair(out + minima, s, r, ks.m[s]);
  }
};
struct PackedQ5K {
  using F = FormatQ5K;
  static constexpr int upper_bits = 1;
  static constexpr int64_t bytes = PackedQ4K::bytes + 512, scales = 64, minima = 192, lines = 320, bits = 320 + 2048;
  template <int I> static wb low(const uint8_t* p, int g, wb line) {
    return or_bytes(low_nibbles(line), bit_at_4<I>(load_wb(p + bits + 128 * g)));
  }
  template <int I> static wb high(const uint8_t* p, int g, wb line) {
    return or_bytes(high_nibbles(line), bit_at_4<I>(load_wb(p + bits + 128 * g + 64)));
  }
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) { PackedQ4K::pack_scales(p, r, out); }
};
struct PackedQ6K {
  using F = FormatQ6K;
  static constexpr int upper_bits = 2, offset = 32;  // of what low and high give
  static constexpr int64_t bytes = 256 + 2048 + 1024, scales = 0, minima = 0, lines = 256, bits = 256 + 2048;
  template <int I> static wb low(const uint8_t* p, int g, wb line) {
    return or_bytes(low_nibbles(line), two_at_4<I / 4 * 2>(load_wb(p + bits + 256 * g + 64 * (I % 4))));
  }
  template <int I> static wb high(const uint8_t* p, int g, wb line) {
    return or_bytes(high_nibbles(line), two_at_4<4 + I / 4 * 2>(load_wb(p + bits + 256 * g + 64 * (I % 4))));
  }
  static void pack_scales(const uint8_t* p, int r, uint8_t* out) {
    for (int s = 0; s < 16; ++s) pack_pair(out + scales, s, r, p[192 + s]);
  }
};

template <class P> inline vi load_scales(const uint8_t* p, int j) {
  if constexpr (P::F::has_min) return pairs_u8(p + P::scales + 32 * j);
  if constexpr (kShiftBy<typename P::F> > 0) return P::scale_pair(p, j);
  return pairs_s8(p + P::scales + 32 * j);
}
template <class P> inline vi load_minima(const uint8_t* p, int j) {
  if constexpr (P::F::has_min) return pairs_u8(p + P::minima + 32 * j);
  return times32(pairs_s8(p + P::minima + 32 * j));
}

// Every line of the stream is asked for in order, also those of scales and upper bits.
// Lines of a block that are asked for with one of its four groups of 8 lines: the whole block in order.
template <class P> constexpr int kGroupLines = static_cast<int>((P::bytes / 64 + 3) / 4);

// Part I of PARTS of a group's.
template <class P, int I, int PARTS> inline void prefetch_ahead(const uint8_t* p, int g) {
  constexpr int lines = kGroupLines<P>;
#pragma GCC unroll 4
  for (int l = lines * I / PARTS; l < lines * (I + 1) / PARTS; ++l)
    prefetch_line(p + kAheadPacked + 64 * (lines * g + l));
}

// Lines ask for what is kAheadPacked behind them, which leaves out as much as the head is long.
inline void prefetch_head(const uint8_t* tile, int64_t bytes) {
  for (int64_t o = 0; o < bytes; o += 64) prefetch_line(tile + o + kAheadPacked);
}

template <class P> inline int64_t super_head(int64_t blocks) {
  if constexpr (kRowHead<typename P::F> > 0) return kFloats;
  return P::F::has_min ? 0 : head_bytes(blocks);
}
// The numbers d of block b, which begins at p.
template <class P> inline vf super_d(const uint8_t* tile, [[maybe_unused]] const uint8_t* p, int64_t b) {
  if constexpr (kRowHead<typename P::F> > 0) return load(reinterpret_cast<const float*>(tile));
  return P::F::has_min ? load_f16(p) : block_d(tile, b);
}
template <class P> inline const uint8_t* first_block(const uint8_t* tile, int64_t blocks) {
  const int64_t head = super_head<P>(blocks);
  prefetch_head(tile, head);
  return tile + head;
}

// Steps 16 g + I, 16 g + 8 + I of `count` lines, then the scales: recursion, because the bits' places are immediates.
template <class P, int C, int I, int N>
inline void packed_lines(const uint8_t* p, int g, const int8_t* const* y, uacc* lo, uacc* hi) {
  if constexpr (I < N) {
    const wb line = group_line<P>(p, g, I);
    prefetch_ahead<P, I, 8>(p, g);
    const wb first = P::template low<I>(p, g, line), second = P::template high<I>(p, g, line);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      lo[c] = udot(lo[c], first, y[c] + 4 * (16 * g + I));
      hi[c] = udot(hi[c], second, y[c] + 4 * (16 * g + 8 + I));
    }
    packed_lines<P, C, I + 1, N>(p, g, y, lo, hi);
  }
}

template <class P, int C, int I> inline void packed_group(const uint8_t* p, int g, const int8_t* const* y, vi* total) {
  constexpr int steps = 64 / P::F::subs;  // of a sub-block: 8 or 4
  if constexpr (I < 8) {
    uacc lo[C], hi[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) lo[c] = hi[c] = uacc_zero();
    packed_lines<P, C, I, I + steps>(p, g, y, lo, hi);
    vi low_scale, high_scale;
    if constexpr (steps == 8) {  // sub-blocks 2 g and 2 g + 1
      const vi pair = load_scales<P>(p, g);
      low_scale = scale_low(pair);
      high_scale = scale_high(pair);
    } else {  // sub-blocks 4 g + I / 4 and 4 g + 2 + I / 4
      const vi first = load_scales<P>(p, 2 * g), second = load_scales<P>(p, 2 * g + 1);
      low_scale = I < 4 ? scale_low(first) : scale_high(first);
      high_scale = I < 4 ? scale_low(second) : scale_high(second);
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = flush_scaled(flush_scaled(total[c], lo[c], low_scale), hi[c], high_scale);
    packed_group<P, C, I + steps>(p, g, y, total);
  }
}

// C tokens from t on, over all blocks of the tile; every lane's operations are those of (3) and (4) in gemm.inl. For
// tiers that sum in int32; the others have narrow.inl.
template <class P, int C> void packed256_few(const TileArgs& a, int t) {
  using F = typename P::F;
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
    sums[c] = a.act.sums + row * a.act.lds + kSumsAt<F>;
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    vi total[C], low[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = low[c] = set1i(0);
    for (int g = 0; g < 4; ++g) packed_group<P, C, 0>(p, g, y, total);
    for (int j = 0; j < F::subs / 2; ++j) {
      const vi minima = load_minima<P>(p, j);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) low[c] = pair_dot(low[c], minima, sums[c] + 2 * j);
    }
    const vf d = super_d<P>(a.packed, p, b);
    const vf dmin = F::has_min ? load_f16(p + 32) : zero();
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[c] = add_super<F>(acc[c], d, dmin, set1(da[c][b]), total[c], low[c]);
      y[c] += 256;
      sums[c] += kSumsPerSuper;
    }
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

template <class P, int I> inline void stage_group(const uint8_t* p, int g, uint8_t* w) {
  if constexpr (I < 8) {
    const wb line = group_line<P>(p, g, I);
    prefetch_ahead<P, I, 8>(p, g);
    store_wb(w + 64 * (16 * g + I), P::template low<I>(p, g, line));
    store_wb(w + 64 * (16 * g + 8 + I), P::template high<I>(p, g, line));
    stage_group<P, I + 1>(p, g, w);
  }
}

template <class P> void packed256_many(const TileArgs& a) {
  using F = typename P::F;
  const int64_t blocks = a.k / 256;
  const uint8_t* p = first_block<P>(a.packed, blocks);
  QuantStage st;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    for (int g = 0; g < 4; ++g) stage_group<P, 0>(p, g, st.w);
    for (int j = 0; j < F::subs / 2; ++j) {
      const vi pair = load_scales<P>(p, j);
      storei(st.sc + 32 * j, scale_low(pair));
      storei(st.sc + 32 * j + 16, scale_high(pair));
      storei(st.m + 16 * j, load_minima<P>(p, j));
    }
    store(st.d, super_d<P>(a.packed, p, b));
    if (F::has_min) store(st.dmin, load_f16(p + 32));
    q256_tokens<F, kQuantTokens>(a, st, b, 0);
  }
}

// ---- blocks of 32 ----

struct PackedQ8_0 {
  using F = FormatQ8_0;
  static constexpr int64_t bytes = 512;
  static constexpr bool is_tile_signed = true;
  static constexpr int tile_offset = 0;
  static int64_t head(int64_t blocks) { return head_bytes(blocks); }
  static vf scale(const uint8_t* tile, int64_t b) { return block_d(tile, b); }
  static void unpack(const uint8_t* p, wb* steps) {
    for (int i = 0; i < 8; ++i) steps[i] = load_signed(p + 64 * i);
  }
  // The eight lines that a tile takes (amx.inl), in place or in `room`.
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t*) { return p; }
};
struct PackedQ4_0 {
  using F = FormatQ4_0;
  static constexpr const int8_t* table = kQ4Values;  // what nibbles stand for: bf16/bf16.inl
  static constexpr int64_t bytes = 256;
  static constexpr bool is_tile_signed = false;
  static constexpr int tile_offset = 8;
  static int64_t head(int64_t blocks) { return head_bytes(blocks); }
  static vf scale(const uint8_t* tile, int64_t b) { return block_d(tile, b); }
  static void unpack(const uint8_t* p, wb* steps) {
    for (int i = 0; i < 4; ++i) {
      const wb line = load_wb(p + 64 * i);
      steps[i] = low_nibbles(line);
      steps[4 + i] = high_nibbles(line);
    }
  }
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t* room) {
    wb steps[8];
    unpack(p, steps);
    for (int i = 0; i < 8; ++i) store_wb(room + 64 * i, steps[i]);
    return room;
  }
};
// Computed with in packed/small.inl.
struct PackedMXFP4 {
  struct F { static constexpr int bytes = 17; };
  static constexpr const int8_t* table = kMxfp4Values;
  static constexpr int64_t bytes = 256;
  static constexpr bool has_min = false, has_fifth = false, is_tile_signed = true, is_halved = false;
  static constexpr int sum_steps = kNarrowSums ? 4 : 8;  // 4 * 2 * 24 * 127 fits in an int16
  static constexpr int tile_offset = kMxfp4Offset;       // of the vector kernels
  static int64_t head(int64_t blocks) { return (blocks * 16 + kHeadAlign - 1) / kHeadAlign * kHeadAlign; }
  // As half_of_e8m0: of e < 2 the second term is the larger one, and has the bits of the subnormal number.
  static vf scale(const uint8_t* tile, int64_t b) {
    const vi e = andi(load_s8(tile + 16 * b), set1i(255));
    return from_bits(maxi(shl<23>(subi(e, set1i(1))), shl<21>(addi(e, set1i(1)))));
  }
  static vf minimum(const uint8_t*, int64_t) { return zero(); }
  static void look_up(const uint8_t* p, const uint8_t* table, wb* steps) {
    for (int i = 0; i < 4; ++i) {
      const wb line = load_wb(p + 64 * i);
      steps[i] = lookup16(low_nibbles(line), table);
      steps[4 + i] = lookup16(high_nibbles(line), table);
    }
  }
  static void unpack(const uint8_t* p, wb* steps) { look_up(p, kMxfp4Unsigned.v, steps); }
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t* room) {
    wb steps[8];
    look_up(p, kMxfp4Signed.v, steps);
    for (int i = 0; i < 8; ++i) store_wb(room + 64 * i, steps[i]);
    return room;
  }
};

template <class P, int C> void packed32_few(const TileArgs& a, int t) {
  using F = typename P::F;
  const int64_t blocks = a.k / 32;
  const uint8_t* p = a.packed + P::head(blocks);
  prefetch_head(a.packed, P::head(blocks));
  const int8_t* y[C];
  const float* da[C];
  const int16_t* sums[C];
  vf acc[C];
  for (int c = 0; c < C; ++c) {
    const int64_t row = token_row(a, t + c);
    y[c] = a.act.q + row * a.act.ldq;
    da[c] = a.act.d + row * a.act.ldd;
    sums[c] = a.act.sums + row * a.act.lds;
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
    wb steps[8];
    P::unpack(p, steps);
    vi isum[C];
    if constexpr (F::is_signed) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) isum[c] = sdot_init(sums[c][kSumsPerBlock * b]);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = sdot(isum[c], steps[i], y[c] + 32 * b + 4 * i);
    } else {
      uacc u[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) u[c] = uacc_zero();
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) u[c] = udot(u[c], steps[i], y[c] + 32 * b + 4 * i);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) isum[c] = flush(set1i(-F::offset * sums[c][kSumsPerBlock * b]), u[c]);
    }
    const vf dw = P::scale(a.packed, b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) acc[c] = add(acc[c], mul(mul(dw, set1(da[c][b])), to_float(isum[c])));
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

template <class P> void packed32_many(const TileArgs& a) {
  const int64_t blocks = a.k / 32;
  const uint8_t* p = a.packed + P::head(blocks);
  prefetch_head(a.packed, P::head(blocks));
  QuantStage st;
  for (int64_t first = 0; first < blocks; first += 8) {
    const int count = static_cast<int>(blocks - first < 8 ? blocks - first : 8);
    for (int b = 0; b < count; ++b, p += P::bytes) {
      wb steps[8];
      for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
      P::unpack(p, steps);
      for (int i = 0; i < 8; ++i) store_wb(st.w + 512 * b + 64 * i, steps[i]);
      store(st.d + 16 * b, P::scale(a.packed, first + b));
    }
    q32_tokens<typename P::F, kQuantTokens>(a, st, first, count, 0);
  }
}

// Up to here a tile is read again for every few tokens (it stays in the first two caches) rather than staged.
constexpr int kFewPacked = 2 * kPackedTokens;

template <class P, int C> void narrow256_few(const TileArgs& a, int t);  // narrow.inl

template <class P> struct Few256 {
  template <int C> static void run(const TileArgs& a, int t) {
    if constexpr (kHalvesApart<C>)
      narrow256_few<P, C>(a, t);
    else
      packed256_few<P, C>(a, t);
  }
};
template <class P> struct Few32 {
  template <int C> static void run(const TileArgs& a, int t) { packed32_few<P, C>(a, t); }
};

template <class Few, int C> void run_few(const TileArgs& a, int t, int count) {
  if constexpr (C == 1) {
    Few::template run<1>(a, t);
  } else {
    if (count == C) return Few::template run<C>(a, t);
    run_few<Few, C - 1>(a, t, count);
  }
}

// All tokens, in parts as equal as possible: one token alone would cost almost as much as two.
template <class Few> void in_few_parts(const TileArgs& a) {
  for (int t = 0; t < a.num_tokens;) {
    const int left = a.num_tokens - t, parts = (left + kPackedTokens - 1) / kPackedTokens,
              count = (left + parts - 1) / parts;
    run_few<Few, kPackedTokens>(a, t, count);
    t += count;
  }
}

template <class P> void packed256_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewPacked) return in_few_parts<Few256<P>>(a);
  packed256_many<P>(a);
}
template <class P> void packed32_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewPacked) return in_few_parts<Few32<P>>(a);
  packed32_many<P>(a);
}

}  // namespace
