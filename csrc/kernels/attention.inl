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

// Rows of two lines are too short, and those of a head too far apart, for the processor to guess the next one.
constexpr int64_t kShortRow = 128;

inline void prefetch_row(const uint8_t* row, int64_t bytes) {
  if (bytes > kShortRow) return;
  for (int64_t at = 0; at < bytes; at += 64) prefetch_line(row + at);
}

// Asks for the K rows of the tile behind `tile`.
inline void prefetch_keys(const AttentionArgs& a, const AttentionSpan& span, int64_t tile) {
  const int32_t* table = a.block_table + a.seq_ids[span.first_row] * a.table_stride;
  const int64_t bytes = kv_bytes(a.kv_type), first = tile + kPositionTile;
  const int64_t end = first + kPositionTile < span.end ? first + kPositionTile : span.end;
  if (a.dim_k * bytes > kShortRow) return;
  for (int64_t p = first; p < end; ++p) {
    const int64_t slot = static_cast<int64_t>(table[p / a.page_size]) * a.page_size + p % a.page_size;
    prefetch_row(a.k + (slot * a.k_slot + span.kv_head * a.k_head) * bytes, a.dim_k * bytes);
  }
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
    if (a.v != a.k) prefetch_row(st.v[p - tile], a.dim_v * bytes);
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

// Of C queries and S sub-tiles, whose stages and scores lie `apart_w` and `apart` floats apart: few queries keep the
// processor busy with more positions. scales: of the positions.
template <int C, int S>
inline void key_kernel(const float* w, int apart_w, const float* const* q, int cols, const float* scales, float* scores,
                       int apart) {
  vf s[S][C];
#pragma GCC unroll 4
  for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) s[t][c] = zero();
  for (int k = 0; k < cols; ++k) {
    vf column[S];
#pragma GCC unroll 4
    for (int t = 0; t < S; ++t) column[t] = load(w + t * apart_w + k * 16);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vf x = set1(q[c][k]);
#pragma GCC unroll 4
      for (int t = 0; t < S; ++t) s[t][c] = fma_(column[t], x, s[t][c]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < S; ++t)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      float* to = scores + t * apart + c * 16;
      store(to, add(load(to), mul(s[t][c], load(scales + t * 16))));
    }
}

// Up to so many queries sub-tiles are scored in pairs, and blocks of values added so; 0 where registers are too few.
constexpr int kFewQueries = kQueryTokens > 8 ? 4 : 0;
constexpr int kApart = kMaxQueries * 16;     // between the scores of two sub-tiles
constexpr int kStageFloats = kKeyCols * 16;  // between the stages of two

template <int C, int S>
void score_queries(const SpanState& st, const KeyStage* stage, int first, int cols, const float* scales, float* scores,
                   int i) {
  for (; i + C <= st.count; i += C) {
    const float* x[C];
    for (int c = 0; c < C; ++c) x[c] = st.q[i + c] + first;
    key_kernel<C, S>(stage->w, kStageFloats, x, cols, scales, scores + i * 16, kApart);
  }
  if constexpr (C > 1) score_queries<fewer(C), S>(st, stage, first, cols, scales, scores, i);
}

// Raw dot products of all queries with the positions of S sub-tiles from `sub` on.
template <int C, int S> void score_sub_tiles(const AttentionArgs& a, SpanState& st, int sub, KeyStage* stage) {
  float* scores = &st.scores[sub][0][0];
  for (int t = 0; t < S; ++t)
    for (int i = 0; i < st.count; ++i) store(scores + t * kApart + i * 16, zero());
  for (int part = 0, first = 0; part < a.k_parts; ++part) {
    const int end = part + 1 < a.k_parts ? a.dim_v : a.dim_k;
    for (int cols; first < end; first += cols) {
      cols = end - first < kKeyCols ? end - first : kKeyCols;
      for (int t = 0; t < S; ++t) stage_keys(a.kv_type, st.k + 16 * (sub + t), first, cols, stage[t]);
      score_queries<C, S>(st, stage, first, cols, st.k_scales[part] + 16 * sub, scores, 0);
    }
  }
}

// Of the sub-tiles that hold positions lo .. hi - 1 of a tile.
inline void score_tile(const AttentionArgs& a, SpanState& st, int64_t lo, int64_t hi, KeyStage* stage) {
  for (int sub = 0; sub < kSubTiles; ++sub) {
    const auto is_seen = [&](int which) { return lo < 16 * which + 16 && hi > 16 * which; };
    if (!is_seen(sub)) continue;
    if (st.count <= kFewQueries && sub + 1 < kSubTiles && is_seen(sub + 1))
      score_sub_tiles<4, 2>(a, st, sub++, stage);
    else
      score_sub_tiles<kQueryTokens, 1>(a, st, sub, stage);
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

// out[c] = fma(p[c][j], v[j], out[c]) for j in [lo, hi), ascending, for D blocks of 16 dimensions, the last of which
// has `width`.
template <int C, int D>
inline void add_values(const SpanState& st, const ValueStage* values, int i, int lo, int hi, int width, int stride,
                       float* out) {
  if (lo >= hi) return;
  vf acc[D][C];
  const auto is_whole = [&](int d) { return d + 1 < D || width == 16; };
#pragma GCC unroll 4
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const float* from = out + c * stride + d * 16;
      acc[d][c] = is_whole(d) ? load(from) : load_n(from, width);
    }
  for (int j = lo; j < hi; ++j) {
    const float* p = &st.scores[j / 16][i][j % 16];
    vf v[D];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) v[d] = load(values[d].v + j * 16);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vf weight = set1(p[c * 16]);
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) acc[d][c] = fma_(weight, v[d], acc[d][c]);
    }
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

// Queries side by side where all of them see the position, one by one before and after.
template <int C, int D>
void add_values_of_queries(const SpanState& st, const ValueStage* values, int64_t tile, int width, int stride,
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
      add_values<1, D>(st, values, i + c, lo[c], hi[c] < joint_lo ? hi[c] : joint_lo, width, stride,
                       out + (i + c) * stride);
    add_values<C, D>(st, values, i, joint_lo, joint_hi, width, stride, out + i * stride);
    for (int c = 0; c < C; ++c)
      add_values<1, D>(st, values, i + c, lo[c] > joint_hi ? lo[c] : joint_hi, hi[c], width, stride,
                       out + (i + c) * stride);
  }
  if constexpr (C > 1) add_values_of_queries<fewer(C), D>(st, values, tile, width, stride, out, i);
}

inline void stage_values(KvType type, const uint8_t* const* rows, int d, int width, int lo, int hi, ValueStage& st) {
  if (type == KvType::F32) return stage_rows<KvType::F32>(rows, d, width, lo, hi, st.v);
  if (type == KvType::BF16) return stage_rows<KvType::BF16>(rows, d, width, lo, hi, st.v);
  if (type == KvType::I8) return stage_rows<KvType::I8>(rows, d, width, lo, hi, st.v);
  stage_rows<KvType::F8>(rows, d, width, lo, hi, st.v);
}

// Adds positions lo .. hi - 1 of a tile (those that any query sees) to the outputs.
void add_values_of_tile(KvType type, const SpanState& st, int64_t tile, int lo, int hi, int dim_v, float* out) {
  ValueStage values[2];
  for (int d = 0; d < dim_v;) {
    const int left = dim_v - d, blocks = st.count <= kFewQueries && left >= 32 ? 2 : 1, width = left < 16 ? left : 16;
    for (int block = 0; block < blocks; ++block) stage_values(type, st.v, d + 16 * block, width, lo, hi, values[block]);
    if (blocks == 2)
      add_values_of_queries<4, 2>(st, values, tile, width, dim_v, out + d, 0);
    else
      add_values_of_queries<kQueryTokens, 1>(st, values, tile, width, dim_v, out + d, 0);
    d += 16 * blocks;
  }
}

void attention_span(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  SpanState st;
  KeyStage stage[2];
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
    prefetch_keys(a, span, tile);
    score_tile(a, st, lo - tile, hi - tile, stage);
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
