// TQ1_0 and TQ2_0 in tiles of 16 rows, and what computes with them. Included by a tier file after packed/k2k3.inl.
// A tile is a head of halves d as in packed.inl, then its blocks of 256 columns, which have no scales:
//
//   TQ2_0  16 lines, which lie as those of Q2_K                                        66 B a row and block
//   TQ1_0  13 lines: line i holds steps 5 i .. 5 i + 4 (the last one four)             54 B
//
// A byte of TQ1_0 codes its digits, the first one the highest, as 256 / 243 of their number, rounded up: the first one
// is what three times the byte has above 256, the others follow from the rest. Every output sees, block by block:
//   isum = sum (q[k] - 1) a[k];                       acc = acc + (d * da) * float(isum)

namespace {

struct PackedTQ2 {
  using F = FormatTQ2;
  static constexpr int64_t bytes = 1024;

  // use(chain, step, codes) for half of the steps, H = 0 or 1: sums in int16 hold no more (32 * 2 * 3 * 127). chain: a
  // number that neighbours do not share, so that their sums need not wait for one another.
  template <int H, class Use> __attribute__((always_inline)) static inline void half(const uint8_t* p, const Use& use) {
#pragma GCC unroll kStepUnroll
    for (int l = 8 * H; l < 8 * H + 8; ++l) {
      const wb line = load_wb(p + 64 * l);
      const int step = 16 * (l / 4) + l % 4;
      use(0, step, move_bits<0, 0>(line, 3));
      use(1, step + 4, move_bits<2, 0>(line, 3));
      use(0, step + 8, move_bits<4, 0>(line, 3));
      use(1, step + 12, move_bits<6, 0>(line, 3));
    }
  }
  static void pack(const uint8_t* steps, uint8_t* out) {
    for (int step = 0; step < 64; ++step)
      for (int i = 0; i < 64; ++i) {
        uint8_t& to = out[64 * (4 * (step / 16) + step % 4) + i];
        to = static_cast<uint8_t>(to | steps[64 * step + i] << (step % 16 / 4 * 2));
      }
  }
  static wb one(const uint8_t* p, int step) {
    const wb line = load_wb(p + 64 * (4 * (step / 16) + step % 4));
    switch (step % 16 / 4) {
      case 0: return move_bits<0, 0>(line, 3);
      case 1: return move_bits<2, 0>(line, 3);
      case 2: return move_bits<4, 0>(line, 3);
      default: return move_bits<6, 0>(line, 3);
    }
  }
};
struct PackedTQ1 {
  using F = FormatTQ1;
  static constexpr int64_t bytes = 832;

  static inline wb rest(wb line) { return add_bytes(add_bytes(line, line), line); }
  template <int H, class Use> __attribute__((always_inline)) static inline void half(const uint8_t* p, const Use& use) {
#pragma GCC unroll kStepUnroll
    for (int l = 7 * H; l < (H == 0 ? 7 : 13); ++l) {
      wb line = load_wb(p + 64 * l);
#pragma GCC unroll 5
      for (int n = 0; n < 5; ++n) {
        if (5 * l + n < 64) use(n % 2, 5 * l + n, first_digit(line));
        line = rest(line);
      }
    }
  }
  static void pack(const uint8_t* steps, uint8_t* out) {
    for (int l = 0; l < 13; ++l)
      for (int i = 0; i < 64; ++i) {
        int number = 0;
        for (int n = 0; n < 5; ++n) number = 3 * number + (5 * l + n < 64 ? steps[64 * (5 * l + n) + i] : 0);
        out[64 * l + i] = static_cast<uint8_t>((256 * number + 242) / 243);
      }
  }
  static wb one(const uint8_t* p, int step) {
    wb line = load_wb(p + 64 * (step / 5));
    for (int n = 0; n < step % 5; ++n) line = rest(line);
    return first_digit(line);
  }
};

// -1 times the sum of a super-block's activations.
inline vi minus_sum(const int16_t* sums) {
  vi total = set1i(0);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) total = pair_dot(total, set1i(-1), sums + 16 + 2 * j);
  return total;
}

// The products of half a block with C tokens are added to their totals.
template <class P, int C, int H> inline void ternary_half(const uint8_t* p, const int8_t* const* y, vi* total) {
  constexpr int chains = C <= 2 ? 2 : 1;
  uacc u[chains][C];
#pragma GCC unroll 2
  for (int i = 0; i < chains; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) u[i][c] = uacc_zero();
  P::template half<H>(p, [&](int chain, int step, wb w) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) u[chain % chains][c] = udot(u[chain % chains][c], w, y[c] + 4 * step);
  });
#pragma GCC unroll 2
  for (int i = 0; i < chains; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = flush(total[c], u[i][c]);
}

template <class P, int C> void ternary_few(const TileArgs& a, int t) {
  const int64_t blocks = a.k / 256;
  const uint8_t* p = a.packed + head_bytes(blocks);
  prefetch_head(a.packed, head_bytes(blocks));
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    const int8_t* y[C];
    const int16_t* sums[C];
    float da[C];
    vi total[C];
#pragma GCC unroll 8
    for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + 256 * b;
      sums[c] = a.act.sums + row * a.act.lds + kSumsPerSuper * b;
      da[c] = a.act.d[row * a.act.ldd + b];
      total[c] = minus_sum(sums[c]);
    }
    ternary_half<P, C, 0>(p, y, total);
    ternary_half<P, C, 1>(p, y, total);
    const vf d = block_d(a.packed, b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      float* acc = a.acc + (t + c) * 16;
      store(acc, add(load(acc), mul(mul(d, set1(da[c])), to_float(total[c]))));
    }
  }
}

// Steps as they are staged, in the interface of the packed ones.
struct StagedTernary {
  template <int H, class Use> __attribute__((always_inline)) static inline void half(const uint8_t* w, const Use& use) {
#pragma GCC unroll kStepUnroll
    for (int step = 32 * H; step < 32 * H + 32; step += 2) {
      use(0, step, load_wb(w + 64 * step));
      use(1, step + 1, load_wb(w + 64 * step + 64));
    }
  }
};

template <int C> void ternary_tokens(const TileArgs& a, const QuantStage& st, int64_t b, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    vi total[C];
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + 256 * b;
      total[c] = minus_sum(a.act.sums + row * a.act.lds + kSumsPerSuper * b);
    }
    ternary_half<StagedTernary, C, 0>(st.w, y, total);
    ternary_half<StagedTernary, C, 1>(st.w, y, total);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      float* acc = a.acc + (t + c) * 16;
      const vf da = set1(a.act.d[token_row(a, t + c) * a.act.ldd + b]);
      store(acc, add(load(acc), mul(mul(load(st.d), da), to_float(total[c]))));
    }
  }
  if constexpr (C > 1) ternary_tokens<fewer(C)>(a, st, b, t);
}

template <class P> inline void stage_ternary(const uint8_t* p, uint8_t* w) {
  const auto keep = [w](int, int step, wb codes) { store_wb(w + 64 * step, codes); };
  P::template half<0>(p, keep);
  P::template half<1>(p, keep);
}

template <class P> void ternary_many(const TileArgs& a) {
  const int64_t blocks = a.k / 256;
  const uint8_t* p = a.packed + head_bytes(blocks);
  prefetch_head(a.packed, head_bytes(blocks));
  QuantStage st;
  for (int64_t b = 0; b < blocks; ++b, p += P::bytes) {
    for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
    stage_ternary<P>(p, st.w);
    store(st.d, block_d(a.packed, b));
    ternary_tokens<kQuantTokens>(a, st, b, 0);
  }
}

template <class P> struct FewTernary {
  template <int C> static void run(const TileArgs& a, int t) { ternary_few<P, C>(a, t); }
};

template <class P> void ternary_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewPacked) return in_few_parts<FewTernary<P>>(a);
  ternary_many<P>(a);
}

template <class P> void pack_tile_ternary(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  using F = typename P::F;
  const int64_t blocks = k / 256, head = head_bytes(blocks);
  std::memset(out, 0, static_cast<size_t>(head + blocks * P::bytes));
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(64) uint8_t codes[16][kTileCols], steps[kTileCols * 16];
    for (int r = 0; r < 16; ++r) {
      const uint8_t* p = rows[r] + b * F::bytes;
      F::codes(p, codes[r]);
      std::memcpy(out + 32 * b + 2 * r, p + F::d_at, 2);
    }
    interleave(codes, kTileCols, steps);
    P::pack(steps, out + head + b * P::bytes);
  }
}

template <class P> struct KernelTernary {
  using Packed = P;
  using Steps = StepsTernary<P>;
  static void tile(const TileArgs& a) { ternary_tile<P>(a); }
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile_ternary<P>(rows, k, out); }
};
template <> struct Kernel<QType::TQ1_0> : KernelTernary<PackedTQ1> {};
template <> struct Kernel<QType::TQ2_0> : KernelTernary<PackedTQ2> {};

}  // namespace
