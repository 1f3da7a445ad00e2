// Attention with products of bf16, of a cache of bf16. Included by a tier file after attention.inl, before
// attention/pairs.inl or attention/tiles.inl, which multiply.
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

constexpr int kChain = 16;           // products of a chain
constexpr int kBf16ValueDims = 128;  // of values that are staged at a time
constexpr int32_t kNotFinite = 0x7f800000;

inline int chains_of(int dims) { return (dims + kChain - 1) / kChain; }

// Sums of p, of every 16th position.
struct LaneSums { alignas(64) float v[kMaxQueries][16]; };

// Up to 16 dimensions from d on of a query, rounded to bf16 in the upper halves; zeros behind the last. A NaN stays
// one.
inline vf rounded_query(const AttentionArgs& a, const float* q, int d) {
  const vf x = a.dim_k - d < 16 ? load_n(q + d, a.dim_k - d) : load(q + d);
  const vi odd = andi(sar<16>(bits(x)), set1i(1));
  return select(unordered(x), set1(__builtin_nanf("")), from_bits(addi(addi(bits(x), odd), set1i(0x7fff))));
}

// Dimensions d .. d + width - 1 of the value at position j of a tile, in a range; zeros for others and behind them.
// largest: greatest bits of magnitudes so far.
inline vf value_at(const SpanState& st, int j, const TileRange& r, int d, int width, vi* largest) {
  if (j < r.lo || j >= r.hi) return zero();
  const uint8_t* row = st.v[j] + 2 * d;
  alignas(64) uint8_t copy[32] = {};
  if (width < 16) row = static_cast<const uint8_t*>(std::memcpy(copy, row, static_cast<size_t>(2 * width)));
  const vf x = load_bf16(row);
  *largest = maxi(*largest, andi(bits(x), set1i(INT32_MAX)));
  return x;
}

// The largest score of query i, scaled, capped and masked in place.
inline float finish_bf16_scores(const AttentionArgs& a, SpanState& st, int i) {
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

// Turns scores of query i into probabilities in bf16; returns what is added to the lanes of its sums.
template <class M> inline vf to_bf16_probabilities(const SpanState& st, M& products, int i, float max) {
  vf p[kSubTiles];
#pragma GCC unroll 4
  for (int sub = 0; sub < kSubTiles; ++sub) {
    const vi nearest = addi(bits(exp_for_bf16(kt_sub(load(st.scores[sub][i]), max))), set1i(0x8000));
    products.set_probabilities(i, sub, from_bits(nearest));
    p[sub] = from_bits(andi(nearest, set1i(-65536)));
  }
  return add(add(p[0], p[1]), add(p[2], p[3]));
}

// Turns the scores of a tile into probabilities, as softmax_tile; sums are those of lanes.
template <class M>
inline void softmax_bf16(const AttentionArgs& a, SpanState& st, M& products, LaneSums& sums, float* maxima) {
  for (int first = 0; first < st.count; first += 16) {
    const int count = st.count - first < 16 ? st.count - first : 16;
    alignas(64) float change[16] = {};
    for (int i = first; i < first + count; ++i) {
      if (st.seen[i].lo >= st.seen[i].hi) continue;
      const float tile_max = finish_bf16_scores(a, st, i);
      const float new_max = tile_max > maxima[i] ? tile_max : maxima[i];
      change[i - first] = maxima[i] - new_max;
      maxima[i] = new_max;
    }
    store(st.rescale + first, exp_negative(load(change)));
    for (int i = first; i < first + count; ++i) {
      if (st.seen[i].lo >= st.seen[i].hi) {
        for (int sub = 0; sub < kSubTiles; ++sub) products.set_probabilities(i, sub, zero());
        continue;
      }
      const vf added = to_bf16_probabilities(st, products, i, maxima[i]);
      store(sums.v[i], fma_(load(sums.v[i]), set1(st.rescale[i]), added));
    }
  }
}

// Adds positions `all` of a tile (those that any query sees) to the outputs.
template <class M>
inline void add_bf16_values(const AttentionArgs& a, SpanState& st, M& products, const TileRange& all, float* out) {
  for (int d = 0; d < a.dim_v; d += kBf16ValueDims) {
    const int width = a.dim_v - d < kBf16ValueDims ? a.dim_v - d : kBf16ValueDims;
    if (products.stage_values(st, d, width, all)) {
      products.add_values(st, width, a.dim_v, out + d, 0, st.count);
      continue;
    }
    for (int i = 0; i < st.count; ++i) {  // 0 times infinity is not 0: each query by itself
      products.stage_values(st, d, width, st.seen[i]);
      products.add_values(st, width, a.dim_v, out + d, i, i + 1);
    }
  }
}

// Scores, or the sums of values, of one tile. Not inlined: see FlushSubnormals.
template <class M>
__attribute__((noinline)) void score_flushed(const AttentionArgs& a, SpanState& st, M& products, const TileRange& all) {
  products.score(a, st, all);
}
template <class M>
__attribute__((noinline)) void add_values_flushed(const AttentionArgs& a, SpanState& st, M& products,
                                                  const TileRange& all, float* out) {
  add_bf16_values(a, st, products, all, out);
}

// M multiplies: it has rounded queries and probabilities, and stages of keys and values.
template <class M>
void span_with(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  SpanState st;
  LaneSums lanes;
  M products;
  start_span(a, span, st, maxima, sums, out);
  products.start(a, st);
  for (int i = 0; i < st.count; ++i) store(lanes.v[i], zero());
  for (int64_t tile = span.begin; tile < span.end; tile += kPositionTile) {
    look_at_tile(st, tile);
    const TileRange all = seen_by_any(st, 0, st.count);
    if (all.lo >= all.hi) continue;
    find_rows(a, span, tile, tile + all.lo, tile + all.hi, st);
    look_ahead(a, span, tile, tile + all.lo, tile + all.hi, st);
    {
      const FlushSubnormals mode;
      score_flushed(a, st, products, all);
    }
    softmax_bf16(a, st, products, lanes, maxima);
    const FlushSubnormals mode;
    add_values_flushed(a, st, products, all, out);
  }
  for (int i = 0; i < st.count; ++i) sums[i] = reduce_add(load(lanes.v[i]));
}

}  // namespace
