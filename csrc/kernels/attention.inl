// Attention of a few queries over a span of cached positions. Included by a tier file after gemm.inl and
// kv.inl.
//
// What one query sees, whatever else is in the call (positions are absolute, ranges are those of the query alone):
//   for every span of 512 positions that it reaches, ascending:  m = -inf, l = 0, o = 0, then
//     for every tile of 64 positions that it reaches, ascending:
//       s[j] = scale * (q . k[j]), for every chunk of 128 dimensions of a part of k with one scale: c = 0;
//              for d ascending: c = fma(k[j][d], q[d], c); sum = sum + c * key scale
//       s[j] = softcap * tanh(s[j] / softcap) if asked
//       m' = max(m, max_j s[j]);  a = exp(m - m');  p[j] = exp(s[j] - m')
//       l = l * a + tree_sum(p);  o = o * a;  for j ascending: o = fma(p[j] * value scale, v[j], o)
//     and the span is merged into the result:  M' = max(M, m);  A = exp(M - M');  B = exp(m - M')
//       L = L * A + l * B;  O = O * A + o * B        (the first span is copied)
//   Scales are those of codes (kv.inl), and 1 for keys and values that are numbers.
//   A sink adds exp(sink - M') to L alone. The output is O / L; a query that sees nothing gives zeros.
// Positions that a query does not see are never part of its arithmetic, so what lies in unused slots does not matter.

namespace {

constexpr int kSubTiles = kPositionTile / 16;
constexpr int kKeyCols = 128;  // dimensions of one chunk of a score
constexpr float kInfinity = __builtin_inff();

struct QueryRange { int64_t lo, hi; };

struct SpanState {
  const float* q[kMaxQueries];
  QueryRange range[kMaxQueries];
  const uint8_t* k[kPositionTile];
  const uint8_t* v[kPositionTile];
  alignas(64) float k_scales[2][kPositionTile];
  alignas(64) float v_scales[kPositionTile];
  alignas(64) float scores[kSubTiles][kMaxQueries][16];
  int count;
};

// The loop variable `sub` hides the function of that name.
inline vf kt_sub(vf x, float y) { return sub(x, set1(y)); }

inline float exp1(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp_(set1(x)));
  return lanes[0];
}

inline QueryRange visible(const AttentionArgs& a, int64_t row, int64_t begin, int64_t end) {
  const int64_t len = a.kv_lens[row];
  const int64_t oldest = a.oldest(len);
  return {oldest > begin ? oldest : begin, len < end ? len : end};
}

// Finds K and V rows of positions [lo, hi) of the tile at `tile`; the others repeat one of them, to be masked later.
inline void find_rows(const AttentionArgs& a, const AttentionSpan& span, int64_t tile, int64_t lo, int64_t hi,
                      SpanState& st) {
  const int32_t* table = a.block_table + a.seq_ids[span.first_row] * a.table_stride;
  const int64_t bytes = kv_bytes(a.kv_type);
  for (int64_t p = lo; p < hi; ++p) {
    const int64_t slot = static_cast<int64_t>(table[p / a.page_size]) * a.page_size + p % a.page_size;
    st.k[p - tile] = a.k + (slot * a.k_slot + span.kv_head * a.k_head) * bytes;
    st.v[p - tile] = a.v + (slot * a.v_slot + span.kv_head * a.v_head) * bytes;
    if (has_scales(a.kv_type)) {
      const float* scales = a.k_scales + slot * a.k_scale_slot + span.kv_head * a.k_scale_head;
      st.k_scales[0][p - tile] = scales[0];
      if (a.k_parts == 2) st.k_scales[1][p - tile] = scales[1];
      st.v_scales[p - tile] = a.v_scales[slot * a.v_scale_slot + span.kv_head * a.v_scale_head];
    }
  }
  for (int64_t j = 0; j < kPositionTile; ++j)
    if (j < lo - tile || j >= hi - tile) {
      st.k[j] = st.k[lo - tile];
      st.v[j] = st.v[lo - tile];
    }
}

struct KeyStage {
  alignas(64) float w[kKeyCols * 16];  // [dimension][position]
};

// Keys of 16 positions side by side.
inline void stage_keys(KvType type, const uint8_t* const* rows, int first, int cols, KeyStage& st) {
  if (type == KvType::F32) return stage_columns<KvType::F32>(rows, first, cols, st.w);
  if (type == KvType::BF16) return stage_columns<KvType::BF16>(rows, first, cols, st.w);
  if (type == KvType::I8) return stage_columns<KvType::I8>(rows, first, cols, st.w);
  stage_columns<KvType::F8>(rows, first, cols, st.w);
}

template <int C> inline void key_kernel(const float* w, const float* const* q, int cols, vf scale, float* scores) {
  vf s[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) s[c] = zero();
  for (int k = 0; k < cols; ++k) {
    const vf column = load(w + k * 16);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) s[c] = fma_(column, set1(q[c][k]), s[c]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) store(scores + c * 16, add(load(scores + c * 16), mul(s[c], scale)));
}

template <int C>
void score_queries(const SpanState& st, const KeyStage& stage, int first, int cols, vf scale, float* scores, int i) {
  for (; i + C <= st.count; i += C) {
    const float* x[C];
    for (int c = 0; c < C; ++c) x[c] = st.q[i + c] + first;
    key_kernel<C>(stage.w, x, cols, scale, scores + i * 16);
  }
  if constexpr (C > 1) score_queries<fewer(C)>(st, stage, first, cols, scale, scores, i);
}

// Raw dot products of all queries with the positions of one sub-tile.
inline void score_sub_tile(const AttentionArgs& a, SpanState& st, int sub, KeyStage& stage) {
  float* scores = &st.scores[sub][0][0];
  for (int i = 0; i < st.count; ++i) store(scores + i * 16, zero());
  for (int part = 0, first = 0; part < a.k_parts; ++part) {
    const int end = part + 1 < a.k_parts ? a.dim_v : a.dim_k;
    const vf scale = load(st.k_scales[part] + 16 * sub);
    for (int cols; first < end; first += cols) {
      cols = end - first < kKeyCols ? end - first : kKeyCols;
      stage_keys(a.kv_type, st.k + 16 * sub, first, cols, stage);
      score_queries<kQueryTokens>(st, stage, first, cols, scale, scores, 0);
    }
  }
}

// Turns the scores of query i into probabilities, times the values' scales, in place; updates its maximum and sum,
// rescales its output.
inline void softmax_step(const AttentionArgs& a, SpanState& st, int i, int lo, int hi, float* max, float* sum,
                         float* out) {
  vf s[kSubTiles];
  for (int sub = 0; sub < kSubTiles; ++sub) {
    vf x = mul(set1(a.scale), load(st.scores[sub][i]));
    if (a.softcap > 0.0f) x = mul(set1(a.softcap), tanh_(div(x, set1(a.softcap))));
    s[sub] = select(lane_range(lo - 16 * sub, hi - 16 * sub), x, set1(-kInfinity));
  }
  const float tile_max = reduce_max(max_(max_(s[0], s[1]), max_(s[2], s[3])));
  const float new_max = tile_max > *max ? tile_max : *max;
  const float alpha = exp1(*max - new_max);
  for (int sub = 0; sub < kSubTiles; ++sub) {
    s[sub] = exp_(kt_sub(s[sub], new_max));
    store(st.scores[sub][i], mul(s[sub], load(st.v_scales + 16 * sub)));
  }
  *sum = *sum * alpha + reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
  *max = new_max;
  if (alpha != 1.0f)
    for (int d = 0; d < a.dim_v; ++d) out[d] = out[d] * alpha;
}

// 16 dimensions of the values of a tile, [position][dimension]. Copied, because rows of a cache lie a power of two
// apart and would push one another out of the first-level cache.
struct ValueStage { alignas(64) float v[kPositionTile * 16]; };

// out[c] = fma(p[c][j], v[j], out[c]) for j in [lo, hi), ascending, for `width` <= 16 dimensions.
template <int C>
inline void add_values(const SpanState& st, const ValueStage& values, int i, int lo, int hi, int width, int stride,
                       float* out) {
  if (lo >= hi) return;
  vf acc[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) acc[c] = width == 16 ? load(out + c * stride) : load_n(out + c * stride, width);
  for (int j = lo; j < hi; ++j) {
    const vf v = load(values.v + j * 16);
    const float* p = &st.scores[j / 16][i][j % 16];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) acc[c] = fma_(set1(p[c * 16]), v, acc[c]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    if (width == 16)
      store(out + c * stride, acc[c]);
    else
      store_n(out + c * stride, acc[c], width);
  }
}

// Queries side by side where all of them see the position, one by one before and after.
template <int C>
void add_values_of_queries(const SpanState& st, const ValueStage& values, int64_t tile, int width, int stride,
                           float* out, int i) {
  for (; i + C <= st.count; i += C) {
    int lo[C], hi[C], joint_lo = 0, joint_hi = kPositionTile;
    for (int c = 0; c < C; ++c) {
      const QueryRange& r = st.range[i + c];
      lo[c] = r.lo > tile ? static_cast<int>(r.lo - tile) : 0;
      hi[c] = r.hi < tile + kPositionTile ? static_cast<int>(r.hi - tile) : kPositionTile;
      joint_lo = lo[c] > joint_lo ? lo[c] : joint_lo;
      joint_hi = hi[c] < joint_hi ? hi[c] : joint_hi;
    }
    if (joint_hi < joint_lo) joint_hi = joint_lo;
    for (int c = 0; c < C; ++c)
      add_values<1>(st, values, i + c, lo[c], hi[c] < joint_lo ? hi[c] : joint_lo, width, stride,
                    out + (i + c) * stride);
    add_values<C>(st, values, i, joint_lo, joint_hi, width, stride, out + i * stride);
    for (int c = 0; c < C; ++c)
      add_values<1>(st, values, i + c, lo[c] > joint_hi ? lo[c] : joint_hi, hi[c], width, stride,
                    out + (i + c) * stride);
  }
  if constexpr (C > 1) add_values_of_queries<fewer(C)>(st, values, tile, width, stride, out, i);
}

inline void stage_values(KvType type, const uint8_t* const* rows, int d, int width, int lo, int hi, ValueStage& st) {
  if (type == KvType::F32) return stage_rows<KvType::F32>(rows, d, width, lo, hi, st.v);
  if (type == KvType::BF16) return stage_rows<KvType::BF16>(rows, d, width, lo, hi, st.v);
  if (type == KvType::I8) return stage_rows<KvType::I8>(rows, d, width, lo, hi, st.v);
  stage_rows<KvType::F8>(rows, d, width, lo, hi, st.v);
}

// Adds positions lo .. hi - 1 of a tile (those that any query sees) to the outputs.
void add_values_of_tile(KvType type, const SpanState& st, int64_t tile, int lo, int hi, int dim_v, float* out) {
  ValueStage values;
  for (int d = 0; d < dim_v; d += 16) {
    const int width = dim_v - d < 16 ? dim_v - d : 16;
    stage_values(type, st.v, d, width, lo, hi, values);
    add_values_of_queries<kQueryTokens>(st, values, tile, width, dim_v, out + d, 0);
  }
}

void attention_span(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  SpanState st;
  KeyStage stage;
  st.count = span.num_rows * span.num_heads;
  for (int r = 0, i = 0; r < span.num_rows; ++r)
    for (int h = 0; h < span.num_heads; ++h, ++i) {
      st.q[i] = a.q + (span.first_row + r) * a.q_row + (span.first_head + h) * a.q_head;
      st.range[i] = visible(a, span.first_row + r, span.begin, span.end);
      maxima[i] = -kInfinity;
      sums[i] = 0.0f;
      for (int d = 0; d < a.dim_v; ++d) out[i * a.dim_v + d] = 0.0f;
    }
  std::memset(st.scores, 0, sizeof st.scores);
  for (int j = 0; j < kPositionTile; ++j) st.k_scales[0][j] = st.k_scales[1][j] = st.v_scales[j] = 1.0f;
  for (int64_t tile = span.begin; tile < span.end; tile += kPositionTile) {
    int64_t lo = tile + kPositionTile, hi = tile;
    for (int i = 0; i < st.count; ++i) {
      const QueryRange r = {st.range[i].lo > tile ? st.range[i].lo : tile,
                            st.range[i].hi < tile + kPositionTile ? st.range[i].hi : tile + kPositionTile};
      if (r.lo >= r.hi) continue;
      lo = r.lo < lo ? r.lo : lo;
      hi = r.hi > hi ? r.hi : hi;
    }
    if (lo >= hi) continue;
    find_rows(a, span, tile, lo, hi, st);
    for (int sub = 0; sub < kSubTiles; ++sub)
      if (lo - tile < 16 * sub + 16 && hi - tile > 16 * sub) score_sub_tile(a, st, sub, stage);
    for (int i = 0; i < st.count; ++i) {
      const int64_t from = st.range[i].lo - tile, to = st.range[i].hi - tile;
      if (from >= kPositionTile || to <= 0 || from >= to) continue;
      softmax_step(a, st, i, static_cast<int>(from > 0 ? from : 0),
                   static_cast<int>(to < kPositionTile ? to : kPositionTile), maxima + i, sums + i, out + i * a.dim_v);
    }
    add_values_of_tile(a.kv_type, st, tile, static_cast<int>(lo - tile), static_cast<int>(hi - tile), a.dim_v, out);
  }
}

void attention_merge(float* max, float* sum, float* out, float max2, float sum2, const float* out2, int dim_v) {
  if (sum2 == 0.0f) return;  // the span holds nothing that this query sees
  if (*sum == 0.0f) {
    *max = max2;
    *sum = sum2;
    for (int d = 0; d < dim_v; ++d) out[d] = out2[d];
    return;
  }
  const float new_max = max2 > *max ? max2 : *max;
  const float a = exp1(*max - new_max), b = exp1(max2 - new_max);
  *max = new_max;
  *sum = *sum * a + sum2 * b;
  for (int d = 0; d < dim_v; ++d) out[d] = out[d] * a + out2[d] * b;
}

void attention_finish(float max, float sum, const float* acc, const float* sink, int dim_v, float* out) {
  if (sum == 0.0f) {
    for (int d = 0; d < dim_v; ++d) out[d] = 0.0f;
    return;
  }
  float scale = 1.0f;
  if (sink != nullptr) {
    const float new_max = *sink > max ? *sink : max;
    scale = exp1(max - new_max);
    sum = sum * scale + exp1(*sink - new_max);
  }
  for (int d = 0; d < dim_v; ++d) out[d] = acc[d] * scale / sum;
}

}  // namespace
