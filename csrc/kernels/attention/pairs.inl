// Products of bf16 of attention/bf16.inl in vector registers. Included by a tier file after it and a layer that has
// dot_bf16 (simd/bf16_*.h).

namespace {

constexpr int kChainWords = kChain / 2;           // pairs of it
constexpr int kPairWide = kWide;                  // sub-tiles, or blocks of dimensions, side by side
constexpr int kPairQueries = kWide == 2 ? 6 : 2;  // times kPairWide: the chains that hide the latency
constexpr int kPairBlock = kPositionTile * 16;    // numbers of a stage of 16 dimensions of values
constexpr int kPairLines = 32;                    // numbers of a line: pairs of 16 lanes

inline wb line_at(const uint16_t* p) { return load_wb(reinterpret_cast<const uint8_t*>(p)); }

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

// Keys of sub-tile `sub`, pairs of dimensions side by side.
inline void stage_key_pairs(const AttentionArgs& a, const SpanState& st, int sub, uint16_t* to) {
  constexpr int kGroup = 32;  // dimensions of a line of a row
  for (int d = 0; d < a.dim_k; d += kGroup) {
    const int cols = a.dim_k - d < kGroup ? a.dim_k - d : kGroup;
    stage_words(st.k + 16 * sub, 2 * d, 2 * cols, reinterpret_cast<float*>(to + d * 16));
  }
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

class PairProducts {
 public:
  void start(const AttentionArgs& a, const SpanState& st) {
    for (int i = 0; i < st.count; ++i)
      for (int k = 0; k < chains_of(a.dim_k); ++k)
        store_bf16(q_ + (static_cast<int64_t>(k) * st.count + i) * kChain, rounded_query(a, st.q[i], k * kChain));
  }

  void set_probabilities(int i, int sub, vf p) { store_bf16(p_[i] + 16 * sub, p); }

  void score(const AttentionArgs& a, SpanState& st, const TileRange& all) {
    const int chains = chains_of(a.dim_k);
    for (int sub = 0; sub < kSubTiles; ++sub) {
      if (!meets(all, sub, 1)) continue;
      const bool is_wide = kPairWide == 2 && sub + 1 < kSubTiles && meets(all, sub + 1, 1);
      for (int t = 0; t <= (is_wide ? 1 : 0); ++t) stage_key_pairs(a, st, sub + t, stage_.keys[t]);
      if (is_wide)
        score_queries<kPairQueries, kPairWide>(st, chains, sub++, 0);
      else
        score_queries<kPairQueries, 1>(st, chains, sub, 0);
    }
  }

  // Up to kBf16ValueDims dimensions from d on of the values at positions r of a tile, zeros for the others. Returns
  // whether all of them are finite.
  bool stage_values(const SpanState& st, int d, int width, const TileRange& r) {
    vi largest = set1i(0);
    for (int at = 0; at < width; at += 16) {
      const int left = width - at < 16 ? width - at : 16;
      uint16_t* to = stage_.values + at / 16 * kPairBlock;
      for (int j = 0; j < kPositionTile; j += 2, to += kPairLines) {
        const vi even = bits(value_at(st, j, r, d + at, left, &largest));
        const vi odd = bits(value_at(st, j + 1, r, d + at, left, &largest));
        storei(reinterpret_cast<int32_t*>(to), ori(andi(sar<16>(even), set1i(0xffff)), odd));
      }
    }
    return reduce_maxi(largest) < kNotFinite;
  }

  // To the outputs of queries from i up to `end`, `width` dimensions that are staged.
  void add_values(SpanState& st, int width, int64_t stride, float* out, int i, int end) {
    add_values_of<kPairQueries>(st, width, stride, out, i, end);
  }

 private:
  template <int C, int S> void score_queries(SpanState& st, int chains, int sub, int i) {
    for (; i + C <= st.count; i += C) {
      if (!meets(seen_by_any(st, i, C), sub, S)) continue;
      st.next_values.ask();
      score_pairs<C, S>(stage_.keys[0], kMaxBf16Dims * 16, q_ + i * kChain, st.count, chains, st.scores[sub][i]);
    }
    if constexpr (C > 1) score_queries<fewer(C), S>(st, chains, sub, i);
  }

  template <int C> void add_values_of(SpanState& st, int width, int64_t stride, float* out, int i, int end) {
    for (; i + C <= end; i += C) {
      const TileRange seen = seen_by_any(st, i, C);
      if (seen.lo >= seen.hi) continue;
      st.next_keys.ask();
      for (int d = 0; d < width;) {
        const int left = width - d;
        const uint16_t* block = stage_.values + d / 16 * kPairBlock;
        float* to = out + i * stride + d;
        if (kPairWide == 2 && left > 16) {
          add_value_pairs<C, kPairWide>(p_[i], block, seen, st.rescale + i, left < 32 ? left - 16 : 16, stride, to);
          d += 32;
        } else {
          add_value_pairs<C, 1>(p_[i], block, seen, st.rescale + i, left < 16 ? left : 16, stride, to);
          d += 16;
        }
      }
    }
    if constexpr (C > 1) add_values_of<fewer(C)>(st, width, stride, out, i, end);
  }

  alignas(64) uint16_t q_[kMaxQueries * kMaxBf16Dims / 2];  // [chain][query][dimension]
  alignas(64) uint16_t p_[kMaxQueries][kPositionTile];
  union {
    alignas(64) uint16_t keys[kPairWide][kMaxBf16Dims * 16];        // [pair of dimensions][position]
    alignas(64) uint16_t values[kBf16ValueDims / 16 * kPairBlock];  // [16 dimensions][pair of positions][dimension]
  } stage_;
};

void attention_span_bf16(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  span_with<PairProducts>(a, span, maxima, sums, out);
}

}  // namespace
