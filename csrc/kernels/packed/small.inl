// Blocks of 32 with an offset, of five bits, or with two scales: tiles of 16 rows, and what computes with them.
// Included by a tier file after packed/ternary.inl. As in packed.inl a tile is a head, then its blocks of 32 columns:
//
//   IQ4_NL  a head of halves d; 4 lines as Q4_0                                             18 B a row and block
//   Q4_1    a head of 16 d, 16 m for every block; 4 lines as Q4_0                           20 B
//   Q5_0    a head of halves d; 4 lines as Q4_0, a line of fifth bits                       22 B
//   Q5_1    a head as Q4_1; lines as Q5_0                                                   24 B
//   NVFP4   a head of 16 pairs of bytes UE4M3 for every block; 4 lines as Q4_0              36 B in 64 columns
//   Q1_0    a head of halves d for every 128 columns; a line of bits as those of Q5_0       18 B in 128 columns
//
// Fifth bits: bit i is that of step i. NVFP4's scales have 7 bits; the first of a pair and the low nibbles are those of
// the first 16 columns.
//
// IQ4_NL, Q5_0 and Q1_0 are (2) of gemm.inl, the latter with q = 1 or -1. Of the others an output sees, for every
// block, ascending:
//   Q4_1, Q5_1  isum = sum q[k] a[k];            acc = acc + (d * da) * float(isum)
//               asum = sum a[k];                 acc = acc + (m * da) * float(asum)
//   NVFP4       as (2) for 16 columns, then for the other 16
// MXFP4, of packed.inl, is computed with here too: values + 12 need no signs.

namespace {

constexpr ByteTable kIq4Signed(kIq4Values, 0);

struct PackedIQ4NL {
  static constexpr const int8_t* table = kIq4Values;
  struct F {
    static constexpr int bytes = 18, offset = kSignFlip;
    static constexpr bool is_signed = true;
  };
  static constexpr int64_t bytes = 256;
  static constexpr bool is_tile_signed = true;
  static constexpr int tile_offset = 0;
  static int64_t head(int64_t blocks) { return head_bytes(blocks); }
  static vf scale(const uint8_t* tile, int64_t b) { return block_d(tile, b); }
  static void unpack(const uint8_t* p, wb* steps) { PackedMXFP4::look_up(p, kIq4Staged.v, steps); }
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t* room) {
    wb steps[8];
    PackedMXFP4::look_up(p, kIq4Signed.v, steps);
    for (int i = 0; i < 8; ++i) store_wb(room + 64 * i, steps[i]);
    return room;
  }
};

// Q4_1, Q5_0 and Q5_1: nibbles at the end of a block, before them fifth bits.
template <int BYTES, bool MIN, bool FIFTH> struct PackedAffine {
  static constexpr int file_bytes = BYTES, tile_offset = MIN ? 0 : 16;
  static constexpr int64_t bytes = FIFTH ? 320 : 256;
  static constexpr bool has_min = MIN, has_fifth = FIFTH, is_tile_signed = false, is_halved = false;
  static constexpr int sum_steps = kNarrowSums && FIFTH ? 4 : 8;  // 4 * 2 * 31 * 127 fits in an int16
  static int64_t head(int64_t blocks) { return MIN ? 64 * blocks : head_bytes(blocks); }
  static vf scale(const uint8_t* tile, int64_t b) { return load_f16(tile + (MIN ? 64 : 32) * b); }
  static vf minimum(const uint8_t* tile, int64_t b) { return MIN ? load_f16(tile + 64 * b + 32) : zero(); }

  template <int I = 0> static void unpack(const uint8_t* p, wb* steps) {
    if constexpr (I < 4) {
      const wb line = load_wb(p + 64 * I);
      steps[I] = low_nibbles(line);
      steps[4 + I] = high_nibbles(line);
      if constexpr (FIFTH) {
        const wb fifth = load_wb(p + 256);
        steps[I] = or_bytes(steps[I], bit_at_4<I>(fifth));
        steps[4 + I] = or_bytes(steps[4 + I], bit_at_4<4 + I>(fifth));
      }
      unpack<I + 1>(p, steps);
    }
  }
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t* room) {
    wb steps[8];
    unpack(p, steps);
    for (int i = 0; i < 8; ++i) store_wb(room + 64 * i, steps[i]);
    return room;
  }
  static void row_block(const uint8_t* row, int64_t b, uint8_t* codes, int r, uint8_t* tile) {
    const uint8_t* p = row + b * file_bytes;
    nibble_codes(p + file_bytes - 16, codes);
    if (FIFTH) add_fifth_bits(p + file_bytes - 20, codes);
    std::memcpy(tile + (MIN ? 64 : 32) * b + 2 * r, p, 2);
    if (MIN) std::memcpy(tile + 64 * b + 32 + 2 * r, p + 2, 2);
  }
};
using PackedQ4_1 = PackedAffine<20, true, false>;
using PackedQ5_0 = PackedAffine<22, false, true>;
using PackedQ5_1 = PackedAffine<24, true, true>;

struct PackedNVFP4 {
  static constexpr int64_t bytes = 256;
  static constexpr bool has_min = false, has_fifth = false, is_tile_signed = true, is_halved = true;
  static constexpr int tile_offset = 0;
  static int64_t head(int64_t blocks) { return 32 * blocks; }
  // Of columns 32 b .. + 15, and of the other 16. fp8_pair gives 256ths, of twice what the table wants.
  static vf scale(const uint8_t* tile, int64_t b, int half = 0) {
    vf first, second;
    fp8_pair(tile + 32 * b, &first, &second);
    return mul(half == 0 ? first : second, set1(128.0f));
  }
  static vf minimum(const uint8_t* tile, int64_t b) { return scale(tile, b, 1); }
  static void unpack(const uint8_t* p, wb* steps) { PackedMXFP4::unpack(p, steps); }
  // Two tiles, each with one half of the columns and zeros.
  static void tile_halves(const uint8_t* p, uint8_t* first, uint8_t* second) {
    wb steps[8];
    PackedMXFP4::look_up(p, kMxfp4Signed.v, steps);
    std::memset(first + 256, 0, 256);
    std::memset(second, 0, 256);
    for (int i = 0; i < 4; ++i) {
      store_wb(first + 64 * i, steps[i]);
      store_wb(second + 256 + 64 * i, steps[4 + i]);
    }
  }
  static void row_block(const uint8_t* row, int64_t b, uint8_t* codes, int r, uint8_t* tile) {
    const uint8_t* p = row + b / 2 * 36;
    nvfp4_codes(p, b % 2, codes);
    for (int half = 0; half < 2; ++half) tile[32 * b + 2 * r + half] = nvfp4_scale(p[2 * (b % 2) + half]);
  }
};

struct PackedQ1_0 {
  static constexpr int64_t bytes = 64;
  static constexpr bool has_min = false, has_fifth = false, is_tile_signed = false, is_halved = false;
  static constexpr int tile_offset = 1, sum_steps = 8;
  static int64_t head(int64_t blocks) { return head_bytes(blocks / 4); }
  static vf scale(const uint8_t* tile, int64_t b) { return block_d(tile, b / 4); }
  static vf minimum(const uint8_t*, int64_t) { return zero(); }
  // Twice the bits: 0 or 2.
  template <int I = 0> static void unpack(const uint8_t* p, wb* steps) {
    if constexpr (I < 8) {
      steps[I] = move_bits<I, 1>(load_wb(p), 1);
      unpack<I + 1>(p, steps);
    }
  }
  static const uint8_t* tile_lines(const uint8_t* p, uint8_t* room) {
    wb steps[8];
    unpack(p, steps);
    for (int i = 0; i < 8; ++i) store_wb(room + 64 * i, steps[i]);
    return room;
  }
};

// Tokens t .. t + C - 1 of a call, from block `first` on.
template <int C> struct SmallTokens {
  const int8_t* y[C];
  const float* d[C];
  const int16_t* sums[C];
  vf acc[C];
  SmallTokens(const TileArgs& a, int t, int64_t first) {
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + 32 * first;
      d[c] = a.act.d + row * a.act.ldd + first;
      sums[c] = a.act.sums + row * a.act.lds + kSumsPerBlock * first;
      acc[c] = load(a.acc + (t + c) * 16);
    }
  }
  void finish(const TileArgs& a, int t) const {
    for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
  }
};

// isum + the products of steps FIRST .. FIRST + N - 1 of block b.
template <int C, int FIRST, int N, class Step>
inline void add_steps(const Step& step, const SmallTokens<C>& tokens, int64_t b, vi* isum) {
  uacc u[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) u[c] = uacc_zero();
#pragma GCC unroll 8
  for (int i = FIRST; i < FIRST + N; ++i) {
    const wb w = step(i);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) u[c] = udot(u[c], w, tokens.y[c] + 32 * b + 4 * i);
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) isum[c] = flush(isum[c], u[c]);
}

// Adds block b, whose steps and scales these are, to the accumulators.
template <class P, int C, class Step>
inline void add_small(const Step& step, vf dw, vf mw, int64_t b, SmallTokens<C>& tokens) {
  vi isum[C];
  if constexpr (P::is_halved) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) isum[c] = set1i(-kMxfp4Offset * tokens.sums[c][kSumsPerBlock * b + 1]);
    add_steps<C, 0, 4>(step, tokens, b, isum);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const int16_t* sums = tokens.sums[c] + kSumsPerBlock * b;
      tokens.acc[c] = add(tokens.acc[c], mul(mul(dw, set1(tokens.d[c][b])), to_float(isum[c])));
      isum[c] = set1i(-kMxfp4Offset * (sums[0] - sums[1]));
    }
    add_steps<C, 4, 4>(step, tokens, b, isum);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
      tokens.acc[c] = add(tokens.acc[c], mul(mul(mw, set1(tokens.d[c][b])), to_float(isum[c])));
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) isum[c] = set1i(-P::tile_offset * tokens.sums[c][kSumsPerBlock * b]);
    add_steps<C, 0, P::sum_steps>(step, tokens, b, isum);
    if constexpr (P::sum_steps < 8) add_steps<C, P::sum_steps, 8 - P::sum_steps>(step, tokens, b, isum);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vf da = set1(tokens.d[c][b]);
      tokens.acc[c] = add(tokens.acc[c], mul(mul(dw, da), to_float(isum[c])));
      if constexpr (P::has_min)
        tokens.acc[c] =
            add(tokens.acc[c], mul(mul(mw, da), set1(static_cast<float>(tokens.sums[c][kSumsPerBlock * b]))));
    }
  }
}

template <class P, int C> void small_few(const TileArgs& a, int t) {
  const int64_t blocks = a.k / 32;
  const uint8_t* p = a.packed + P::head(blocks);
  prefetch_head(a.packed, P::head(blocks));
  SmallTokens<C> tokens(a, t, 0);
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
#pragma GCC unroll 5
    for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
    wb steps[8];
    P::unpack(p, steps);
    add_small<P, C>([&](int i) { return steps[i]; }, P::scale(a.packed, b), P::minimum(a.packed, b), b, tokens);
  }
  tokens.finish(a, t);
}

// `count` staged blocks from number `first` on; what else a block has is in st.m.
template <class P, int C> void small_tokens(const TileArgs& a, const QuantStage& st, int64_t first, int count, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    SmallTokens<C> tokens(a, t, first);
    for (int b = 0; b < count; ++b)
      add_small<P, C>([&](int i) { return load_wb(st.w + 512 * b + 64 * i); }, load(st.d + 16 * b),
                      from_bits(loadi(st.m + 16 * b)), b, tokens);
    tokens.finish(a, t);
  }
  if constexpr (C > 1) small_tokens<P, fewer(C)>(a, st, first, count, t);
}

template <class P> void small_many(const TileArgs& a) {
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
      storei(st.m + 16 * b, bits(P::minimum(a.packed, first + b)));
    }
    small_tokens<P, kQuantTokens>(a, st, first, count, 0);
  }
}

template <class P> struct FewSmall {
  template <int C> static void run(const TileArgs& a, int t) { small_few<P, C>(a, t); }
};

template <class P> void small_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewPacked) return in_few_parts<FewSmall<P>>(a);
  small_many<P>(a);
}

// Two blocks at a time, as pack_tile32 does it.
template <class P> void pack_tile_small(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const int64_t blocks = k / 32, head = P::head(blocks);
  std::memset(out, 0, static_cast<size_t>(head + blocks * P::bytes));
  alignas(64) uint8_t codes[16][64] = {}, steps[64 * 16];
  const uint8_t* from[16];
  for (int r = 0; r < 16; ++r) from[r] = codes[r];
  for (int64_t b = 0; b < blocks; b += 2) {
    const int count = blocks - b > 1 ? 2 : 1;
    for (int r = 0; r < 16; ++r)
      for (int i = 0; i < count; ++i) P::row_block(rows[r], b + i, codes[r] + 32 * i, r, out);
    transpose16(from, steps);
    for (int i = 0; i < count; ++i) {
      const uint8_t* q = steps + 512 * i;
      uint8_t* lines = out + head + (b + i) * P::bytes;
      for (int j = 0; j < 256; ++j) lines[j] = static_cast<uint8_t>((q[j] & 15) | q[256 + j] << 4);
      if constexpr (P::has_fifth)
        for (int step = 0; step < 8; ++step)
          for (int j = 0; j < 64; ++j)
            lines[256 + j] = static_cast<uint8_t>(lines[256 + j] | q[64 * step + j] >> 4 << step);
    }
  }
}

// Bits i, i + 4, .. i + 28 of a word, side by side.
inline uint32_t every_fourth(uint32_t word, int i) {
  uint32_t x = word >> i & 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000f000fu;
  return (x | x >> 12) & 0xffu;
}

void pack_tile_q1(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const int64_t blocks = k / 128, head = head_bytes(blocks);
  std::memset(out, 0, static_cast<size_t>(head));
  for (int r = 0; r < 16; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* p = rows[r] + 18 * b;
      std::memcpy(out + 32 * b + 2 * r, p, 2);
      for (int part = 0; part < 4; ++part) {  // of 32 columns, column c being in bit c
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(p[2 + 4 * part + i]) << (8 * i);
        uint8_t* line = out + head + 64 * (4 * b + part) + 4 * r;
        for (int i = 0; i < 4; ++i) line[i] = static_cast<uint8_t>(every_fourth(word, i));
      }
    }
}

template <class P> struct KernelSmall {
  using Packed = P;
  using Steps = StepsSmall<P>;
  static void tile(const TileArgs& a) { small_tile<P>(a); }
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile_small<P>(rows, k, out); }
};
template <> struct Kernel<QType::Q4_1> : KernelSmall<PackedQ4_1> {};
template <> struct Kernel<QType::Q5_0> : KernelSmall<PackedQ5_0> {};
template <> struct Kernel<QType::Q5_1> : KernelSmall<PackedQ5_1> {};
template <> struct Kernel<QType::NVFP4> : KernelSmall<PackedNVFP4> {};
template <> struct Kernel<QType::Q1_0> : KernelSmall<PackedQ1_0> {
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile_q1(rows, k, out); }
};
template <> struct Kernel<QType::IQ4_NL> : Kernel32<PackedIQ4NL> {};
template <> struct Kernel<QType::MXFP4> : Kernel32<PackedMXFP4> {
  static void tile(const TileArgs& a) { small_tile<PackedMXFP4>(a); }
};

// ---- all types whose record says Kernels::Low ----

// Adds to a.acc, as packed_tile.
void low_tile(const TileArgs& a) {
  with_format(a.type, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::info.kernels == Kernels::Low) {
      static_assert(kIsPackedAsSaid<F>);
      Kernel<F::type>::tile(a);
    }
  });
}

void pack_low_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  with_format(type, [&](auto format) {
    if constexpr (decltype(format)::info.kernels == Kernels::Low) Kernel<decltype(format)::type>::pack(rows, k, out);
  });
}

}  // namespace
