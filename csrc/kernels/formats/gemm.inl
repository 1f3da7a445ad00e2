// 16 weight rows times any number of activation rows, one output per lane.
// Included by a tier file after quant.inl and unquantized.inl.
//
// Weights are staged 256 columns at a time: unpacked once into L1 with the 16 rows side by side, then used for all
// tokens of the call. Each output is one lane's accumulator, and sees these operations in this order, whatever the
// number of tokens, the split of rows or the tier (all fp32 operations round once; no fused ones but in (1)):
//
// (1) F32, F16, BF16, for every chunk of 512 columns (the last may be shorter), with 8 sums s[0..7]:
//       s = 0; for k ascending: s[k % 8] = fma(w[k], x[k], s[k % 8]), columns missing from the last 8 counting as 0;
//       acc = acc + (((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)))
// (2) Q8_0, Q4_0, for every block of 32, ascending, with q the integer weight and a, da the int8 activations and scale:
//       isum = sum q[k] a[k] (int32, exact);              acc = acc + (d * da) * float(isum)
// (3) Q4_K, Q5_K, for every super-block of 256, with sub-blocks s of 32:
//       isum = sum_s sc[s] sum_k q[k] a[k];               acc = acc + (d * da) * float(isum)
//       msum = sum_s m[s] sum_k a[k];                     acc = acc - (dmin * da) * float(msum)
// (4) Q6_K, for every super-block of 256, with sub-blocks s of 16:
//       isum = sum_s sc[s] sum_k (q[k] - 32) a[k];        acc = acc + (d * da) * float(isum)
//     Q2_K as (3) with sub-blocks of 16, Q3_K as (4) with q[k] - 4; what formats/low.inl has besides is in
//     packed/small.inl and packed/ternary.inl
// (5) MXFP4 as (2), IQ4_XS as (4) with sub-blocks of 32, q the value in the format's table (no offset).
// (6) IQ2, IQ3 and IQ1 as (4), with q as packed/grid.inl says.
// Integer sums cannot overflow: |isum| <= 256 * 127 * 128 * 63 in (4).

namespace {

struct QuantStage {
  alignas(64) uint8_t w[kTileCols * 16];  // [column / 4][row][column % 4]
  alignas(64) int32_t sc[16 * 16];        // [sub-block][row], see scale_lane
  alignas(64) int32_t m[8 * 16];          // [pair of sub-blocks][row], two int16
  alignas(64) float d[8 * 16];            // [block][row]
  alignas(64) float dmin[16] = {};
};

// ---- blocks of 32 ----

struct FormatQ8_0 {
  static constexpr int bytes = 34, offset = kSignFlip;  // of the dot products along a row
  static constexpr bool is_signed = true;
  static void unpack(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 32; ++i) q[i] = p[2 + i] ^ kSignFlip;
  }
  static vp dot(const uint8_t* p, const int8_t* y) { return dot_s8(p + 2, y); }
};
struct FormatQ4_0 {
  static constexpr int bytes = 18, offset = 8;
  static constexpr bool is_signed = false;
  static void unpack(const uint8_t* p, uint8_t* q) { storeb(q, nibbles16(p + 2)); }
  static vp dot(const uint8_t* p, const int8_t* y) { return dot_u8(nibbles16(p + 2), y); }
};

// The half at byte offset `at` of 16 rows, as fp32.
inline vf load_halves(const uint8_t* const* rows, int64_t at) {
  alignas(64) uint8_t halves[64];
  for (int r = 0; r < 16; ++r) std::memcpy(halves + 2 * r, rows[r] + at, 2);
  return load_f16(halves);
}

inline void interleave(uint8_t (*unpacked)[kTileCols], int cols, uint8_t* w) {
  const uint8_t* src[16];
  for (int c = 0; c < cols; c += 64) {
    for (int r = 0; r < 16; ++r) src[r] = unpacked[r] + c;
    transpose16(src, w + c * 16);
  }
}

template <class F> void stage_q32(const uint8_t* const* rows, int64_t block, int count, QuantStage& st) {
  alignas(64) uint8_t unpacked[16][kTileCols];
  for (int r = 0; r < 16; ++r) {
    const uint8_t* p = rows[r] + block * F::bytes;
    for (int b = 0; b < count; ++b) F::unpack(p + b * F::bytes, unpacked[r] + 32 * b);
    if (count % 2 != 0) std::memset(unpacked[r] + 32 * count, 0, 32);  // columns are interleaved 64 at a time
  }
  for (int b = 0; b < count; ++b) store(st.d + b * 16, load_halves(rows, (block + b) * F::bytes));
  interleave(unpacked, 32 * count, st.w);
}

template <class F, int C> inline void dot32(const uint8_t* w, const int8_t* const* y, const int16_t* sums, vi* isum) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (C % 2 == 0) {
    matrix_sums<C, 8>(w, y, isum);
#pragma GCC unroll 16
    for (int c = 0; c < C && !F::is_signed; ++c) isum[c] = addi(isum[c], set1i(-8 * sums[c]));
    return;
  }
#endif
  if constexpr (F::is_signed) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) isum[c] = sdot_init(sums[c]);
#pragma GCC unroll kStepUnroll
    for (int step = 0; step < 8; ++step) {
      const wb column = load_wb(w + 64 * step);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) isum[c] = sdot(isum[c], column, y[c] + 4 * step);
    }
  } else {
    uacc u[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) u[c] = uacc_zero();
#pragma GCC unroll kStepUnroll
    for (int step = 0; step < 8; ++step) {  // at most 8 * 2 * 15 * 127 in an int16
      const wb column = load_wb(w + 64 * step);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) u[c] = udot(u[c], column, y[c] + 4 * step);
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) isum[c] = flush(set1i(-8 * sums[c]), u[c]);
  }
}

template <class F, int C> void q32_tokens(const TileArgs& a, const QuantStage& st, int64_t block, int count, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    const float* d[C];
    const int16_t* s[C];
    vf acc[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + block * 32;
      d[c] = a.act.d + row * a.act.ldd + block;
      s[c] = a.act.sums + row * a.act.lds + kSumsPerBlock * block;
      acc[c] = load(a.acc + (t + c) * 16);
    }
    for (int b = 0; b < count; ++b) {
      const int8_t* yb[C];
      int16_t sb[C];
      vi isum[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        yb[c] = y[c] + 32 * b;
        sb[c] = s[c][kSumsPerBlock * b];
      }
      dot32<F, C>(st.w + 512 * b, yb, sb, isum);
      const vf dw = load(st.d + 16 * b);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[c] = add(acc[c], mul(mul(dw, set1(d[c][b])), to_float(isum[c])));
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
  }
  if constexpr (C > 1) q32_tokens<F, fewer(C)>(a, st, block, count, t);
}

// Sixteen rows are sixteen streams, more than the hardware prefetcher follows: on an AMD Zen 3 core this raised a
// K-quant matrix that is not in the caches from 3.2 to about 5 (Q6_K) and from 6.3 to about 8.5 GB/s (Q4_K). Asks for
// the `bytes` that stand kAhead behind `offset` in each row, or, past the row's end, in the rows of the next tile. A
// prefetch of an address that is not mapped does nothing.
constexpr int64_t kAhead = 1536;
inline void prefetch_rows(const TileArgs& a, int64_t offset, int64_t bytes, int64_t row_bytes) {
  const int64_t stride = a.rows[1] - a.rows[0];
  int64_t at = offset + kAhead;
  if (at >= row_bytes) at += 16 * stride - row_bytes;
  for (int r = 0; r < 16; ++r) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(a.rows[r]) + static_cast<uintptr_t>(at);
    for (int64_t o = 0; o < bytes; o += 64) __builtin_prefetch(reinterpret_cast<const void*>(p + o));
  }
}

// Without a stage: one dot product per row and block, then 16 rows at once.
template <class F> void q32_few(const TileArgs& a) {
  for (int t = 0; t < a.num_tokens; ++t) {
    const int64_t row = token_row(a, t);
    const int8_t* y = a.act.q + row * a.act.ldq;
    const float* da = a.act.d + row * a.act.ldd;
    const int16_t* sums = a.act.sums + row * a.act.lds;
    vf acc = zero();
    for (int64_t b = 0; b < a.k / 32; ++b) {
      if (t == 0 && b % 2 == 0) prefetch_rows(a, b * F::bytes, 2 * F::bytes, a.k / 32 * F::bytes);
      vp parts[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) parts[r] = F::dot(a.rows[r] + b * F::bytes, y + 32 * b);
      const vi isum = subi(reduce_rows(parts), set1i(F::offset * sums[kSumsPerBlock * b]));
      acc = add(acc, mul(mul(load_halves(a.rows, b * F::bytes), set1(da[b])), to_float(isum)));
    }
    store(a.acc + t * 16, acc);
  }
}

template <class F> void q32_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewTokens) return q32_few<F>(a);
  QuantStage st;
  const int64_t blocks = a.k / 32;
  for (int64_t block = 0; block < blocks; block += 8) {
    const int count = static_cast<int>(blocks - block < 8 ? blocks - block : 8);
    stage_q32<F>(a.rows, block, count, st);
    q32_tokens<F, kQuantTokens>(a, st, block, count, 0);
  }
}

// ---- super-blocks of 256 ----

inline int32_t pack_pair(int lo, int hi) {
  return static_cast<int32_t>(static_cast<uint16_t>(lo) | (static_cast<uint32_t>(static_cast<uint16_t>(hi)) << 16));
}

template <class F> void stage_scales(const uint8_t* p, int r, QuantStage& st) {
  if constexpr (F::has_min) {
    const KScales ks = unpack_scales(p + 4);
    for (int s = 0; s < 8; ++s) st.sc[s * 16 + r] = scale_lane(ks.sc[s]);
    for (int s = 0; s < 4; ++s) st.m[s * 16 + r] = pack_pair(ks.m[2 * s], ks.m[2 * s + 1]);
  } else {  // the offset 32 becomes a minimum of 32 * scale, subtracted before the sum is scaled
    const int8_t* sc = reinterpret_cast<const int8_t*>(p + 192);
    for (int s = 0; s < 16; ++s) st.sc[s * 16 + r] = scale_lane(sc[s]);
    for (int s = 0; s < 8; ++s) st.m[s * 16 + r] = pack_pair(32 * sc[2 * s], 32 * sc[2 * s + 1]);
  }
}

template <class F> void stage_q256(const uint8_t* const* rows, int64_t block, QuantStage& st) {
  alignas(64) uint8_t unpacked[16][kTileCols];
  for (int r = 0; r < 16; ++r) {
    const uint8_t* p = rows[r] + block * F::bytes;
    unpack256<F>(p, unpacked[r]);
    stage_scales<F>(p, r, st);
  }
  store(st.d, load_halves(rows, block * F::bytes + (F::has_min ? 0 : 208)));
  if (F::has_min) store(st.dmin, load_halves(rows, block * F::bytes + 2));
  interleave(unpacked, kTileCols, st.w);
}

// Whether sums in int16 begin with what the offset of Q6_K makes of them, instead of zero. |w y01 + w y23| <= 2 * 63 *
// 127 fits in an int16, the sum of 4 steps does not; but that of (w - 32) y does, for 4 * 2 * 32 * 127 = 32512, and
// int16 sums wrap around. So the sum begins with -32 times that of the activations, is exact after 4 steps (a
// sub-block), whatever it was in between, and needs no minimum.
template <class F> constexpr bool kIsCentred = kNarrowSums && std::is_same_v<F, FormatQ6K>;

// Where the sums of activations begin that the sub-blocks' minima are multiplied with, see ActForm::Q256.
template <class F> constexpr int kSumsAt = F::subs == 16 ? 0 : 16;

template <class F> constexpr int steps_of_sum() {
  constexpr int sub_steps = 64 / F::subs;
  if constexpr (kNarrowSums && F::has_min) return F::narrow_steps < sub_steps ? F::narrow_steps : sub_steps;
  return sub_steps;
}

// pairs: see ActForm::Q256; read when the format is centred.
template <class F, int C>
inline void dot256(const QuantStage& st, const int8_t* const* y, const int16_t* const* pairs, vi* total) {
  constexpr int sub_steps = 64 / F::subs, steps = steps_of_sum<F>();
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) total[c] = set1i(0);
  for (int first = 0; first < 64; first += steps) {
    uacc u[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      if constexpr (kIsCentred<F>)
        u[c] = uacc_pair(pairs[c] + 2 * (first / 4));
      else
        u[c] = uacc_zero();
    }
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (C % 2 == 0) {
      const int8_t* from[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) from[c] = y[c] + 4 * first;
      matrix_sums<C, steps>(st.w + 64 * first, from, u);
    } else
#endif
#pragma GCC unroll kStepUnroll
      for (int step = 0; step < steps; ++step) {
        const wb column = load_wb(st.w + 64 * (first + step));
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) u[c] = udot(u[c], column, y[c] + 4 * (first + step));
      }
    const vi scale = loadi(st.sc + first / sub_steps * 16);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) total[c] = flush_scaled(total[c], u[c], scale);
  }
}

// acc + the contribution of one super-block: (3) or (4) above.
template <class F> inline vf add_super(vf acc, vf d, vf dmin, vf da, vi isum, vi msum) {
  if constexpr (!F::has_min) return add(acc, mul(mul(d, da), to_float(subi(isum, msum))));
  acc = add(acc, mul(mul(d, da), to_float(isum)));
  return sub(acc, mul(mul(dmin, da), to_float(msum)));
}

template <class F, int C> void q256_tokens(const TileArgs& a, const QuantStage& st, int64_t block, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    const int16_t *sums[C], *pairs[C];
    const float* da[C];
    vi total[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + block * 256;
      sums[c] = a.act.sums + row * a.act.lds + block * kSumsPerSuper + kSumsAt<F>;
      pairs[c] = a.act.sums + row * a.act.lds + block * kSumsPerSuper + kPairSums;
      da[c] = a.act.d + row * a.act.ldd + block;
    }
    dot256<F, C>(st, y, pairs, total);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      vi low = set1i(0);
      if constexpr (!kIsCentred<F>)
        for (int s = 0; s < F::subs / 2; ++s) low = pair_dot(low, loadi(st.m + 16 * s), sums[c] + 2 * s);
      float* acc = a.acc + (t + c) * 16;
      store(acc, add_super<F>(load(acc), load(st.d), load(st.dmin), set1(*da[c]), total[c], low));
    }
  }
  if constexpr (C > 1) q256_tokens<F, fewer(C)>(a, st, block, t);
}

template <class F, int S> inline vp dot_chunks(const uint8_t* p, const int8_t* y, vs scales, vp acc) {
  if constexpr (S == 8) {
    return acc;
  } else {
    return dot_chunks<F, S + 1>(p, y, scales, add_scaled<S>(acc, F::template chunk<S>(p), y + 32 * S, scales));
  }
}

// Without a stage: one dot product per row and super-block, then 16 rows at once.
template <class F> void q256_few(const TileArgs& a) {
  for (int t = 0; t < a.num_tokens; ++t) {
    const int64_t row = token_row(a, t);
    vf acc = zero();
    for (int64_t b = 0; b < a.k / 256; ++b) {
      if (t == 0) prefetch_rows(a, b * F::bytes, F::bytes, a.k / 256 * F::bytes);
      const int8_t* y = a.act.q + row * a.act.ldq + 256 * b;
      const int16_t* sums = a.act.sums + row * a.act.lds + kSumsPerSuper * b;
      vp parts[16], mins[16];
      for (int r = 0; r < 16; ++r) {
        const uint8_t* p = a.rows[r] + b * F::bytes;
        if constexpr (F::has_min) {
          const KScales ks = unpack_scales(p + 4);
          parts[r] = dot_chunks<F, 0>(p, y, scales8(ks.sc), zerop());
          mins[r] = dot_mins8(ks.m, sums + 16);
        } else {
          parts[r] = dot_chunks<F, 0>(p, y, scales16(p + 192), zerop());
          mins[r] = dot_mins16(p + 192, sums);
        }
      }
      const vi msum = F::has_min ? reduce_rows(mins) : shl<5>(reduce_rows(mins));
      const vf d = load_halves(a.rows, b * F::bytes + (F::has_min ? 0 : 208));
      const vf dmin = F::has_min ? load_halves(a.rows, b * F::bytes + 2) : zero();
      acc = add_super<F>(acc, d, dmin, set1(a.act.d[row * a.act.ldd + b]), reduce_rows(parts), msum);
    }
    store(a.acc + t * 16, acc);
  }
}

template <class F> void q256_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewTokens) return q256_few<F>(a);
  QuantStage st;
  for (int64_t block = 0; block < a.k / 256; ++block) {
    stage_q256<F>(a.rows, block, st);
    q256_tokens<F, kQuantTokens>(a, st, block, 0);
  }
}

template <> struct RowKernel<QType::Q8_0> { using F = FormatQ8_0; };
template <> struct RowKernel<QType::Q4_0> { using F = FormatQ4_0; };
template <> struct RowKernel<QType::Q4_K> { using F = FormatQ4K; };
template <> struct RowKernel<QType::Q5_K> { using F = FormatQ5K; };
template <> struct RowKernel<QType::Q6_K> { using F = FormatQ6K; };

void tile(const TileArgs& a) {
  for (int t = 0; t < a.num_tokens; ++t) store(a.acc + t * 16, zero());
  if (is_grouped(a.type)) return parts::grouped_by_blocks(a);
  with_format(a.type, [&](auto format) {
    constexpr const FormatInfo& info = decltype(format)::info;
    using F = typename RowKernel<info.type>::F;
    if constexpr (info.kernels == Kernels::Plain)
      float_tile<info.type>(a);
    else if constexpr (is_staged(info))
      parts::grid_rows_tile(a);
    else if constexpr (info.kernels == Kernels::Fp8)
      return;  // make_weight refuses it
    else if constexpr (std::is_void_v<F>)
      parts::tile_by_blocks(a);
    else if constexpr (info.form == ActForm::Q32)
      q32_tile<F>(a);
    else
      q256_tile<F>(a);
  });
}

}  // namespace
