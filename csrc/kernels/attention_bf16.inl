// Attention with products of bf16, of a cache of bf16. Included by a tier file after attention.inl and a layer that has
// dot_bf16 (simd/bf16_*.h).
//
// What differs from attention.inl, for a query in whatever call and of whatever tier:
//   q is rounded to bf16;
//   q . k[j]: sum = 0; for every 16 dimensions, ascending: sum = sum + chain of them (zeros behind the last)
//   p[j] is rounded to bf16, and the sum l is that of what is multiplied: weights that are off by a rounding still add
//     up to 1, so that what all values have in common is kept
//   o: for every 16 positions that lie together, ascending: o = o + chain of p[j] * v[j], p[j] = 0 where j is not seen
// A chain starts at 0 and takes 8 pairs, ascending, of each the odd product first, then the even one; every sum is
// rounded once. That is what VDPBF16PS does on Zen and by Intel's definition, and what a tile of AMX does in its even
// columns where the odd ones are zeros. In chains and the sums of o, subnormal numbers count as zeros.
// Values that are no finite numbers are multiplied for those queries alone that see them.
//
// Errors, |s| standing for the sum of the magnitudes of products: q and p by 2^-8 of themselves (p so twice, for l is
// of the same), the sums by (16 + dim / 16) 2^-24 |s| and (16 + 32) 2^-24 |s| in a span.

namespace {

constexpr int kChain = 16;                                  // products of a chain
constexpr int kChainWords = kChain / 2;                     // pairs of it
constexpr int kPairWide = kWide;                            // sub-tiles, or blocks of dimensions, side by side
constexpr int kPairQueries = kWide == 2 ? 6 : 2;            // times kPairWide: the chains that hide the latency
constexpr int kPairDims = 128;                              // of values that are staged at a time
constexpr int kPairBlock = kPositionTile * 16;              // numbers of a stage of 16 dimensions of values
constexpr int kPairLines = 32;                              // numbers of a line: pairs of 16 lanes
constexpr int32_t kNotFinite = 0x7f800000;

inline int chains_of(int dims) { return (dims + kChain - 1) / kChain; }

struct PairState {
  alignas(64) uint16_t q[kMaxQueries * kMaxBf16Dims / 2];  // [chain][query][dimension], zeros behind the last
  alignas(64) uint16_t p[kMaxQueries][kPositionTile];
  alignas(64) float sums[kMaxQueries][16];  // of p, of every 16th position
};

// Keys of a sub-tile, [pair of dimensions][position].
struct KeyPairs {
  alignas(64) uint16_t w[kPairWide][kMaxBf16Dims * 16];
};
// Values of a tile, [block of 16 dimensions][pair of positions][dimension].
struct ValuePairs {
  alignas(64) uint16_t v[kPairDims / 16 * kPairBlock];
};

inline wb line_at(const uint16_t* p) { return load_wb(reinterpret_cast<const uint8_t*>(p)); }

inline void start_pairs(const AttentionArgs& a, const SpanState& st, PairState& pairs) {
  const int chains = chains_of(a.dim_k);
  for (int i = 0; i < st.count; ++i) {
    for (int k = 0; k < chains; ++k) {
      uint16_t* to = pairs.q + (static_cast<int64_t>(k) * st.count + i) * kChain;
      const int left = a.dim_k - k * kChain;
      const vf x = left < kChain ? load_n(st.q[i] + k * kChain, left) : load(st.q[i] + k * kChain);
      const vi odd = andi(sar<16>(bits(x)), set1i(1));
      const vf rounded = from_bits(addi(addi(bits(x), odd), set1i(0x7fff)));
      store_bf16(to, select(unordered(x), set1(__builtin_nanf("")), rounded));
    }
    store(pairs.sums[i], zero());
  }
}

// scores[t * kApart + c * 16 + lane] = q[c] . key of position 16 t + lane; w: kPairWide stages; of `count` queries.
template <int C, int S>
inline void score_pairs(const uint16_t* w, int64_t apart_w, const uint16_t* q, int count, int chains, float* scores) {
  vf sum[S][C];
#pragma GCC unroll 4
  for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) sum[t][c] = zero();
  for (int k = 0; k < chains; ++k, w += kChainWords * kPairLines, q += count * kChain) {
    vf chain[S][C];
#pragma GCC unroll 4
    for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) chain[t][c] = zero();
#pragma GCC unroll 8
    for (int i = 0; i < kChainWords; ++i) {
      wb line[S];
#pragma GCC unroll 4
      for (int t = 0; t < S; ++t) line[t] = line_at(w + t * apart_w + i * kPairLines);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int t = 0; t < S; ++t) chain[t][c] = dot_bf16(chain[t][c], line[t], q + c * kChain + 2 * i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sum[t][c] = flushed(add(sum[t][c], chain[t][c]));
  }
#pragma GCC unroll 4
  for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(scores + t * kApart + c * 16, sum[t][c]);
}

template <int C, int S>
void score_pairs_of_queries(SpanState& st, const PairState& pairs, const KeyPairs& keys, int chains, int sub, int i) {
  for (; i + C <= st.count; i += C) {
    if (!meets(seen_by_any(st, i, C), sub, S)) continue;
    st.next_values.ask();
    score_pairs<C, S>(keys.w[0], sizeof keys.w[0] / sizeof keys.w[0][0], pairs.q + i * kChain, st.count, chains,
                      st.scores[sub][i]);
  }
  if constexpr (C > 1) score_pairs_of_queries<fewer(C), S>(st, pairs, keys, chains, sub, i);
}

// Keys of sub-tile `sub`, pairs of dimensions side by side.
inline void stage_key_pairs(const AttentionArgs& a, const SpanState& st, int sub, uint16_t* to) {
  constexpr int kGroup = 32;  // dimensions of a line of a row
  for (int d = 0; d < a.dim_k; d += kGroup) {
    const int cols = a.dim_k - d < kGroup ? a.dim_k - d : kGroup;
    stage_words(st.k + 16 * sub, 2 * d, 2 * cols, reinterpret_cast<float*>(to + d * 16));
  }
}

inline void score_tile_pairs(const AttentionArgs& a, SpanState& st, const PairState& pairs, const TileRange& all,
                             KeyPairs& keys) {
  const int chains = chains_of(a.dim_k);
  for (int sub = 0; sub < kSubTiles; ++sub) {
    if (!meets(all, sub, 1)) continue;
    const bool is_wide = kPairWide == 2 && sub + 1 < kSubTiles && meets(all, sub + 1, 1);
    for (int t = 0; t <= (is_wide ? 1 : 0); ++t) stage_key_pairs(a, st, sub + t, keys.w[t]);
    if (is_wide)
      score_pairs_of_queries<kPairQueries, kPairWide>(st, pairs, keys, chains, sub++, 0);
    else
      score_pairs_of_queries<kPairQueries, 1>(st, pairs, keys, chains, sub, 0);
  }
}

// The largest score of query i, scaled, capped and masked in place.
inline float finish_pair_scores(const AttentionArgs& a, SpanState& st, int i) {
  if (a.softcap > 0.0f || st.seen[i].lo > 0 || st.seen[i].hi < kPositionTile) return finish_scores(a, st, i);
  vf s[kSubTiles];
#pragma GCC unroll 4
  for (int sub = 0; sub < kSubTiles; ++sub) {
    s[sub] = mul(set1(a.scale), load(st.scores[sub][i]));
    store(st.scores[sub][i], s[sub]);
  }
  return reduce_max(max_(max_(s[0], s[1]), max_(s[2], s[3])));
}

// exp(x) for x <= 0, off by less than 2^-16 of it: what is rounded to bf16 needs no more. Below 2^-126 it may be 0, for
// minus infinity it is. A NaN gives one.
inline vf exp_for_bf16(vf x) {
  const vf shift = set1(0x1.8p23f + 127.0f), z = max_(set1(-127.0f), mul(x, set1(1.44269504f)));
  const vf shifted = add(z, shift), r = sub(z, sub(shifted, shift));  // z = n + r, n + 127 in the lowest bits
  vf y = set1(9.58285e-3f);
  y = fma_(y, r, set1(5.590643e-2f));
  y = fma_(y, r, set1(2.4024099e-1f));
  y = fma_(y, r, set1(6.9312419e-1f));
  y = fma_(y, r, set1(1.0f));
  return mul(y, from_bits(shl<23>(bits(shifted))));
}

// Turns scores of query i into probabilities in bf16; what is added to a lane of its sums.
inline vf to_probability_pairs(const SpanState& st, PairState& pairs, int i, float max) {
  vf p[kSubTiles];
#pragma GCC unroll 4
  for (int sub = 0; sub < kSubTiles; ++sub) {
    const vi nearest = addi(bits(exp_for_bf16(kt_sub(load(st.scores[sub][i]), max))), set1i(0x8000));
    store_bf16(pairs.p[i] + 16 * sub, from_bits(nearest));
    p[sub] = from_bits(andi(nearest, set1i(-65536)));
  }
  return add(add(p[0], p[1]), add(p[2], p[3]));
}

// Turns the scores of a tile into probabilities, as softmax_tile; sums are those of lanes.
inline void softmax_pairs(const AttentionArgs& a, SpanState& st, PairState& pairs, float* maxima) {
  for (int first = 0; first < st.count; first += 16) {
    const int count = st.count - first < 16 ? st.count - first : 16;
    alignas(64) float change[16] = {};
    for (int i = first; i < first + count; ++i) {
      if (st.seen[i].lo >= st.seen[i].hi) continue;
      const float tile_max = finish_pair_scores(a, st, i);
      const float new_max = tile_max > maxima[i] ? tile_max : maxima[i];
      change[i - first] = maxima[i] - new_max;
      maxima[i] = new_max;
    }
    store(st.rescale + first, exp_negative(load(change)));
    for (int i = first; i < first + count; ++i) {
      if (st.seen[i].lo >= st.seen[i].hi) {
        std::memset(pairs.p[i], 0, sizeof pairs.p[i]);
        continue;
      }
      const vf added = to_probability_pairs(st, pairs, i, maxima[i]);
      store(pairs.sums[i], fma_(load(pairs.sums[i]), set1(st.rescale[i]), added));
    }
  }
}

// Up to kPairDims dimensions from d on of the values at positions r of a tile, zeros for the others. Returns whether
// all of them are finite.
inline bool stage_value_pairs(const SpanState& st, int d, int width, const TileRange& r,
                              ValuePairs& stage) {
  vi largest = set1i(0);
  for (int at = 0; at < width; at += 16) {
    const int left = width - at < 16 ? width - at : 16;
    const auto numbers = [&](int j) {
      if (j < r.lo || j >= r.hi) return zero();
      const uint8_t* row = st.v[j] + 2 * (d + at);
      alignas(64) uint8_t copy[32] = {};
      if (left < 16) row = static_cast<const uint8_t*>(std::memcpy(copy, row, static_cast<size_t>(2 * left)));
      return load_bf16(row);
    };
    uint16_t* to = stage.v + at / 16 * kPairBlock;
    for (int j = 0; j < kPositionTile; j += 2, to += kPairLines) {
      const vi even = bits(numbers(j)), odd = bits(numbers(j + 1));
      largest = maxi(largest, maxi(andi(even, set1i(INT32_MAX)), andi(odd, set1i(INT32_MAX))));
      storei(reinterpret_cast<int32_t*>(to), ori(andi(sar<16>(even), set1i(0xffff)), odd));
    }
  }
  return reduce_maxi(largest) < kNotFinite;
}

// out[c] = out[c] * rescale[c] + the chains of the sub-tiles that `seen` meets, for D blocks of 16 dimensions, the last
// of which has `width`.
template <int C, int D>
inline void add_value_pairs(const uint16_t* p, const uint16_t* values, const TileRange& seen, const float* rescale,
                            int width, int64_t stride, float* out) {
  vf acc[D][C];
  const auto is_whole = [&](int d) { return d + 1 < D || width == 16; };
#pragma GCC unroll 4
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const float* from = out + c * stride + d * 16;
      const vf old = is_whole(d) ? load(from) : load_n(from, width);
      acc[d][c] = flushed(mul(old, flushed(set1(rescale[c]))));
    }
  for (int sub = seen.lo / 16; sub < (seen.hi + 15) / 16; ++sub) {
    vf chain[D][C];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) chain[d][c] = zero();
#pragma GCC unroll 8
    for (int i = 0; i < kChainWords; ++i) {
      wb line[D];
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) line[d] = line_at(values + d * kPairBlock + (sub * kChainWords + i) * kPairLines);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
          chain[d][c] = dot_bf16(chain[d][c], line[d], p + c * kPositionTile + 16 * sub + 2 * i);
    }
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[d][c] = flushed(add(acc[d][c], chain[d][c]));
  }
#pragma GCC unroll 4
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      float* to = out + c * stride + d * 16;
      if (is_whole(d))
        store(to, acc[d][c]);
      else
        store_n(to, acc[d][c], width);
    }
}

// Of `width` dimensions, up to kPairDims; of queries from i up to `end`.
template <int C>
void add_value_pairs_of_queries(SpanState& st, const PairState& pairs, const ValuePairs& values, int width,
                                int64_t stride, float* out, int i, int end) {
  for (; i + C <= end; i += C) {
    const TileRange seen = seen_by_any(st, i, C);
    if (seen.lo >= seen.hi) continue;
    st.next_keys.ask();
    for (int d = 0; d < width;) {
      const int left = width - d;
      const uint16_t* block = values.v + d / 16 * kPairBlock;
      float* to = out + i * stride + d;
      if (kPairWide == 2 && left > 16) {
        add_value_pairs<C, kPairWide>(pairs.p[i], block, seen, st.rescale + i, left < 32 ? left - 16 : 16, stride, to);
        d += 32;
      } else {
        add_value_pairs<C, 1>(pairs.p[i], block, seen, st.rescale + i, left < 16 ? left : 16, stride, to);
        d += 16;
      }
    }
  }
  if constexpr (C > 1) add_value_pairs_of_queries<fewer(C)>(st, pairs, values, width, stride, out, i, end);
}

// Adds positions `all` of a tile (those that any query sees) to the outputs.
void add_value_pairs_of_tile(const AttentionArgs& a, SpanState& st, const PairState& pairs, const TileRange& all,
                             ValuePairs& stage, float* out) {
  for (int d = 0; d < a.dim_v; d += kPairDims) {
    const int width = a.dim_v - d < kPairDims ? a.dim_v - d : kPairDims;
    if (stage_value_pairs(st, d, width, all, stage)) {
      add_value_pairs_of_queries<kPairQueries>(st, pairs, stage, width, a.dim_v, out + d, 0, st.count);
      continue;
    }
    for (int i = 0; i < st.count; ++i) {  // 0 times infinity is not 0: each query by itself
      stage_value_pairs(st, d, width, st.seen[i], stage);
      add_value_pairs_of_queries<1>(st, pairs, stage, width, a.dim_v, out + d, i, i + 1);
    }
  }
}

// Scores, or the sums of values, of one tile: see FlushSubnormals.
__attribute__((noinline)) void score_flushed(const AttentionArgs& a, SpanState& st, const PairState& pairs,
                                             const TileRange& all, KeyPairs& keys) {
  score_tile_pairs(a, st, pairs, all, keys);
}
__attribute__((noinline)) void add_values_flushed(const AttentionArgs& a, SpanState& st, const PairState& pairs,
                                                  const TileRange& all, ValuePairs& values, float* out) {
  add_value_pairs_of_tile(a, st, pairs, all, values, out);
}

void attention_span_bf16(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  SpanState st;
  PairState pairs;
  union {
    KeyPairs keys;
    ValuePairs values;
  } stage;
  start_span(a, span, st, maxima, sums, out);
  start_pairs(a, st, pairs);
  for (int64_t tile = span.begin; tile < span.end; tile += kPositionTile) {
    look_at_tile(st, tile);
    const TileRange all = seen_by_any(st, 0, st.count);
    if (all.lo >= all.hi) continue;
    find_rows(a, span, tile, tile + all.lo, tile + all.hi, st);
    look_ahead(a, span, tile, tile + all.lo, tile + all.hi, st);
    {
      const FlushSubnormals mode;
      score_flushed(a, st, pairs, all, stage.keys);
    }
    softmax_pairs(a, st, pairs, maxima);
    const FlushSubnormals mode;
    add_values_flushed(a, st, pairs, all, stage.values, out);
  }
  for (int i = 0; i < st.count; ++i) sums[i] = reduce_add(load(pairs.sums[i]));
}

}  // namespace
