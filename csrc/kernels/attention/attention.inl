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
constexpr int kKeyCols = 128;   // dimensions of one chunk of a score
constexpr int kValueCols = 64;  // dimensions of values that are staged at a time: they stay in the first-level cache
// Sub-tiles, or blocks of 16 dimensions of values, of a kernel of kQueryTokens queries: their sums fill the registers.
constexpr int kWide = kQueryTokens > 8 ? 2 : 1;
constexpr float kInfinity = __builtin_inff();

struct QueryRange { int64_t lo, hi; };
struct TileRange { int lo, hi; };  // positions of a tile; none where lo >= hi

// Rows of a cache that are asked for while other things are computed, some with every block of queries: all at once
// they keep the processor waiting as long as if they were read when they are needed.
struct RowsAhead {
  const uint8_t* rows[kPositionTile];
  int64_t bytes;  // of a row
  int count, at, step;

  void start(int64_t row_bytes, int calls) {
    bytes = row_bytes;
    at = 0;
    step = (count + calls - 1) / calls;
  }
  void ask() {
    for (const int end = at + step < count ? at + step : count; at < end; ++at)
      for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_line(rows[at] + byte);
  }
};

struct SpanState {
  const float* q[kMaxQueries];
  QueryRange range[kMaxQueries];
  const uint8_t* k[kPositionTile];
  const uint8_t* v[kPositionTile];
  alignas(64) float k_scales[2][kPositionTile];
  alignas(64) float v_scales[kPositionTile];
  TileRange seen[kMaxQueries];             // of the tile at hand
  RowsAhead next_values, next_keys;        // of this tile, asked for while it is scored; of the tile behind it
  alignas(64) float rescale[kMaxQueries];  // a: what the outputs so far are multiplied by
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

// Slots of positions from `position` on, without a division for each.
struct Slots {
  const int32_t* pages;
  int64_t page_size, offset;

  Slots(const AttentionArgs& a, int64_t seq, int64_t position)
      : pages(a.block_table + seq * a.table_stride + position / a.page_size),
        page_size(a.page_size),
        offset(position % a.page_size) {}
  int64_t next() {
    const int64_t slot = *pages * page_size + offset;
    if (++offset == page_size) {
      offset = 0;
      ++pages;
    }
    return slot;
  }
};

// Plans which rows are asked for while tile `tile` is computed, of which positions [lo, hi) are seen. One block of
// queries is done too soon to spread them; the processor guesses long rows itself then.
inline void look_ahead(const AttentionArgs& a, const AttentionSpan& span, int64_t tile, int64_t lo, int64_t hi,
                       SpanState& st) {
  const int64_t bytes = kv_bytes(a.kv_type), k_bytes = a.dim_k * bytes, v_bytes = a.dim_v * bytes;
  const int blocks = (st.count + kQueryTokens - 1) / kQueryTokens;
  const auto is_asked = [&](int64_t row_bytes) { return blocks > 1 || row_bytes <= kShortRow; };
  st.next_values.count = st.next_keys.count = 0;
  if (a.v != a.k && is_asked(v_bytes))
    for (int64_t p = lo; p < hi; ++p) st.next_values.rows[st.next_values.count++] = st.v[p - tile];
  const int64_t next = tile + kPositionTile, last = a.kv_lens[span.first_row + span.num_rows - 1];
  const int64_t end = next + kPositionTile < last ? next + kPositionTile : last;
  if (next < end && is_asked(k_bytes)) {
    Slots slots(a, a.seq_ids[span.first_row], next);
    for (int64_t p = next; p < end; ++p)
      st.next_keys.rows[st.next_keys.count++] = a.k + (slots.next() * a.k_slot + span.kv_head * a.k_head) * bytes;
  }
  const int chunks = (a.dim_k + kKeyCols - 1) / kKeyCols;
  st.next_values.start(v_bytes, blocks > 1 ? blocks * chunks * (kSubTiles / kWide) : 1);
  st.next_keys.start(k_bytes, blocks > 1 ? blocks * ((a.dim_v + kValueCols - 1) / kValueCols) : 1);
  if (blocks == 1) {
    st.next_values.ask();
    st.next_keys.ask();
  }
}

// Finds K and V rows of positions [lo, hi) of the tile at `tile`; the others repeat one of them, to be masked later.
inline void find_rows(const AttentionArgs& a, const AttentionSpan& span, int64_t tile, int64_t lo, int64_t hi,
                      SpanState& st) {
  const int64_t bytes = kv_bytes(a.kv_type);
  Slots slots(a, a.seq_ids[span.first_row], lo);
  for (int64_t p = lo; p < hi; ++p) {
    const int64_t slot = slots.next();
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

// Of C queries and S sub-tiles, whose stages and scores lie `apart_w` and `apart` floats apart. scales: of the
// positions. is_first: what was in `scores` counts as 0.
template <int C, int S>
inline void key_kernel(const float* w, int apart_w, const float* const* q, int cols, const float* scales, bool is_first,
                       float* scores, int apart) {
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
      store(to, add(is_first ? zero() : load(to), mul(s[t][c], load(scales + t * 16))));
    }
}

constexpr int kApart = kMaxQueries * 16;     // between the scores of two sub-tiles
constexpr int kStageFloats = kKeyCols * 16;  // between the stages of two

// What any of `count` queries from i on sees.
inline TileRange seen_by_any(const SpanState& st, int i, int count) {
  TileRange all = {kPositionTile, 0};
  for (int c = i; c < i + count; ++c) {
    if (st.seen[c].lo >= st.seen[c].hi) continue;
    all.lo = st.seen[c].lo < all.lo ? st.seen[c].lo : all.lo;
    all.hi = st.seen[c].hi > all.hi ? st.seen[c].hi : all.hi;
  }
  return all;
}

inline bool meets(const TileRange& r, int sub, int count) { return r.lo < 16 * (sub + count) && r.hi > 16 * sub; }

template <int C, int S>
void score_queries(SpanState& st, int sub, const KeyStage* stage, int first, int cols, const float* scales, int i) {
  for (; i + C <= st.count; i += C) {
    if (!meets(seen_by_any(st, i, C), sub, S)) continue;
    const float* x[C];
    for (int c = 0; c < C; ++c) x[c] = st.q[i + c] + first;
    st.next_values.ask();
    key_kernel<C, S>(stage->w, kStageFloats, x, cols, scales, first == 0, st.scores[sub][i], kApart);
  }
  if constexpr (C > 1) score_queries<fewer(C), S>(st, sub, stage, first, cols, scales, i);
}

// Raw dot products of the queries with the positions of S sub-tiles from `sub` on.
template <int S> void score_sub_tiles(const AttentionArgs& a, SpanState& st, int sub, KeyStage* stage) {
  for (int part = 0, first = 0; part < a.k_parts; ++part) {
    const int end = part + 1 < a.k_parts ? a.dim_v : a.dim_k;
    for (int cols; first < end; first += cols) {
      cols = end - first < kKeyCols ? end - first : kKeyCols;
      for (int t = 0; t < S; ++t) stage_keys(a.kv_type, st.k + 16 * (sub + t), first, cols, stage[t]);
      score_queries<kQueryTokens, S>(st, sub, stage, first, cols, st.k_scales[part] + 16 * sub, 0);
    }
  }
}

// Of the sub-tiles that hold positions of `all`.
inline void score_tile(const AttentionArgs& a, SpanState& st, const TileRange& all, KeyStage* stage) {
  for (int sub = 0; sub < kSubTiles; ++sub) {
    if (!meets(all, sub, 1)) continue;
    if (kWide == 2 && sub + 1 < kSubTiles && meets(all, sub + 1, 1))
      score_sub_tiles<kWide>(a, st, sub++, stage);
    else
      score_sub_tiles<1>(a, st, sub, stage);
  }
}

// Scales, caps and masks the scores of query i in place; returns the largest.
inline float finish_scores(const AttentionArgs& a, SpanState& st, int i) {
  vf s[kSubTiles];
#pragma GCC unroll 4
  for (int sub = 0; sub < kSubTiles; ++sub) {
    vf x = mul(set1(a.scale), load(st.scores[sub][i]));
    if (a.softcap > 0.0f) x = mul(set1(a.softcap), tanh_(div(x, set1(a.softcap))));
    s[sub] = select(lane_range(st.seen[i].lo - 16 * sub, st.seen[i].hi - 16 * sub), x, set1(-kInfinity));
    store(st.scores[sub][i], s[sub]);
  }
  return reduce_max(max_(max_(s[0], s[1]), max_(s[2], s[3])));
}

// Turns scores of query i into probabilities, times the values' scales, in place; returns the sum of the former.
inline float to_probabilities(SpanState& st, int i, float max) {
  vf p[kSubTiles];
#pragma GCC unroll 4
  for (int sub = 0; sub < kSubTiles; ++sub) {
    p[sub] = exp_negative(kt_sub(load(st.scores[sub][i]), max));
    store(st.scores[sub][i], mul(p[sub], load(st.v_scales + 16 * sub)));
  }
  return reduce_add(add(add(p[0], p[1]), add(p[2], p[3])));
}

// Turns the scores of a tile into probabilities; updates maxima and sums, and says how to rescale outputs. Of 16
// queries at a time, so that their rescaling is one vector.
inline void softmax_tile(const AttentionArgs& a, SpanState& st, float* maxima, float* sums) {
  for (int first = 0; first < st.count; first += 16) {
    const int count = st.count - first < 16 ? st.count - first : 16;
    alignas(64) float change[16] = {};
    for (int c = 0; c < count; ++c) {
      const int i = first + c;
      if (st.seen[i].lo >= st.seen[i].hi) continue;
      const float tile_max = finish_scores(a, st, i);
      const float new_max = tile_max > maxima[i] ? tile_max : maxima[i];
      change[c] = maxima[i] - new_max;
      maxima[i] = new_max;
    }
    store(st.rescale + first, exp_negative(load(change)));
    for (int i = first; i < first + count; ++i)
      if (st.seen[i].lo < st.seen[i].hi) sums[i] = sums[i] * st.rescale[i] + to_probabilities(st, i, maxima[i]);
  }
}

// Up to kValueCols dimensions of the values of a tile, [block of 16][position][dimension]. Copied, because rows of a
// cache lie a power of two apart and would push one another out of the first-level cache.
constexpr int kValueBlock = kPositionTile * 16;
struct ValueStage { alignas(64) float v[kValueCols / 16 * kValueBlock]; };

// out[c] = fma(p[c][j], v[j], out[c] * rescale[c]) for j in [lo, hi), ascending, for D blocks of 16 dimensions, the
// last of which has `width`. rescale becomes 1.
template <int C, int D>
inline void add_values(const SpanState& st, const float* values, int i, int lo, int hi, int width, int64_t stride,
                       float* rescale, float* out) {
  if (lo >= hi) return;
  vf acc[D][C];
  const auto is_whole = [&](int d) { return d + 1 < D || width == 16; };
#pragma GCC unroll 4
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const float* from = out + c * stride + d * 16;
      acc[d][c] = mul(is_whole(d) ? load(from) : load_n(from, width), set1(rescale[c]));
    }
  for (int j = lo; j < hi; ++j) {
    const float* p = &st.scores[j / 16][i][j % 16];
    vf v[D];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) v[d] = load(values + d * kValueBlock + j * 16);
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
  for (int c = 0; c < C; ++c) rescale[c] = 1.0f;
}

// What C queries see of a tile: positions that all of them see, and whether some see others too.
struct JointRange {
  TileRange range;
  bool is_uneven;
};

template <int C> inline JointRange seen_by_all(const SpanState& st, int i) {
  JointRange joint = {{0, kPositionTile}, false};
  for (int c = i; c < i + C; ++c) {
    joint.range.lo = st.seen[c].lo > joint.range.lo ? st.seen[c].lo : joint.range.lo;
    joint.range.hi = st.seen[c].hi < joint.range.hi ? st.seen[c].hi : joint.range.hi;
    joint.is_uneven |= st.seen[c].lo != st.seen[i].lo || st.seen[c].hi != st.seen[i].hi;
  }
  if (joint.range.hi < joint.range.lo) joint.range.hi = joint.range.lo;
  return joint;
}

// C queries side by side where all of them see the position, one by one before and after.
template <int C, int D>
inline void add_values_around(const SpanState& st, const float* values, int i, const JointRange& joint, int width,
                              int64_t stride, float* out) {
  float rescale[C];
  std::memcpy(rescale, st.rescale + i, sizeof rescale);
  const auto one_by_one = [&](bool is_before) {
    for (int c = 0; c < C; ++c) {
      const TileRange &r = st.seen[i + c], &all = joint.range;
      const int lo = is_before || r.lo > all.hi ? r.lo : all.hi, hi = is_before && r.hi > all.lo ? all.lo : r.hi;
      add_values<1, D>(st, values, i + c, lo, hi, width, stride, rescale + c, out + c * stride);
    }
  };
  if (joint.is_uneven) one_by_one(true);
  add_values<C, D>(st, values, i, joint.range.lo, joint.range.hi, width, stride, rescale, out);
  if (joint.is_uneven) one_by_one(false);
}

// Of `width` dimensions, up to kValueCols.
template <int C>
void add_values_of_queries(SpanState& st, const ValueStage& values, int width, int64_t stride, float* out, int i) {
  for (; i + C <= st.count; i += C) {
    const JointRange joint = seen_by_all<C>(st, i);
    st.next_keys.ask();
    if (i + 2 * C <= st.count)  // the next outputs: rows of C heads are too short to be guessed
      for (int c = C; c < 2 * C; ++c)
        for (int d = 0; d < width; d += 16) prefetch_line(reinterpret_cast<const uint8_t*>(out + (i + c) * stride + d));
    for (int d = 0; d < width;) {
      const int left = width - d;
      const float* block = values.v + d / 16 * kValueBlock;
      float* to = out + i * stride + d;
      if (kWide == 2 && left > 16) {
        add_values_around<C, kWide>(st, block, i, joint, left < 32 ? left - 16 : 16, stride, to);
        d += 32;
      } else {
        add_values_around<C, 1>(st, block, i, joint, left < 16 ? left : 16, stride, to);
        d += 16;
      }
    }
  }
  if constexpr (C > 1) add_values_of_queries<fewer(C)>(st, values, width, stride, out, i);
}

inline void stage_values(KvType type, const uint8_t* const* rows, int d, int width, const TileRange& r, float* to) {
  if (type == KvType::F32) return stage_rows<KvType::F32>(rows, d, width, r.lo, r.hi, to);
  if (type == KvType::BF16) return stage_rows<KvType::BF16>(rows, d, width, r.lo, r.hi, to);
  if (type == KvType::I8) return stage_rows<KvType::I8>(rows, d, width, r.lo, r.hi, to);
  stage_rows<KvType::F8>(rows, d, width, r.lo, r.hi, to);
}

// Adds positions `all` of a tile (those that any query sees) to the outputs.
void add_values_of_tile(const AttentionArgs& a, SpanState& st, const TileRange& all, ValueStage& stage, float* out) {
  for (int d = 0; d < a.dim_v; d += kValueCols) {
    const int width = a.dim_v - d < kValueCols ? a.dim_v - d : kValueCols;
    for (int at = 0; at < width; at += 16)
      stage_values(a.kv_type, st.v, d + at, width - at < 16 ? width - at : 16, all, stage.v + at / 16 * kValueBlock);
    add_values_of_queries<kQueryTokens>(st, stage, width, a.dim_v, out + d, 0);
  }
}

// What each query sees of the tile.
inline void look_at_tile(SpanState& st, int64_t tile) {
  for (int i = 0; i < st.count; ++i) {
    const int64_t lo = st.range[i].lo - tile, hi = st.range[i].hi - tile;
    st.seen[i] = {static_cast<int>(lo < 0               ? 0
                                   : lo > kPositionTile ? kPositionTile
                                                        : lo),
                  static_cast<int>(hi < 0               ? 0
                                   : hi > kPositionTile ? kPositionTile
                                                        : hi)};
  }
}

// Queries of the span, of which nothing is known yet.
inline void start_span(const AttentionArgs& a, const AttentionSpan& span, SpanState& st, float* maxima, float* sums,
                       float* out) {
  st.count = span.num_rows * span.num_heads;
  for (int r = 0, i = 0; r < span.num_rows; ++r)
    for (int h = 0; h < span.num_heads; ++h, ++i) {
      st.q[i] = a.q + (span.first_row + r) * a.q_row + (span.first_head + h) * a.q_head;
      st.range[i] = visible(a, span.first_row + r, span.begin, span.end);
      maxima[i] = -kInfinity;
      sums[i] = 0.0f;
      for (int d = 0; d < a.dim_v; ++d) out[i * a.dim_v + d] = 0.0f;
    }
  for (int sub = 0; sub < kSubTiles; ++sub)
    for (int i = 0; i < st.count; ++i) store(st.scores[sub][i], zero());
  for (int j = 0; j < kPositionTile; ++j) st.k_scales[0][j] = st.k_scales[1][j] = st.v_scales[j] = 1.0f;
}

void attention_span(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  SpanState st;
  KeyStage keys[kWide];
  ValueStage values;
  start_span(a, span, st, maxima, sums, out);
  for (int64_t tile = span.begin; tile < span.end; tile += kPositionTile) {
    look_at_tile(st, tile);
    const TileRange all = seen_by_any(st, 0, st.count);
    if (all.lo >= all.hi) continue;
    find_rows(a, span, tile, tile + all.lo, tile + all.hi, st);
    look_ahead(a, span, tile, tile + all.lo, tile + all.hi, st);
    score_tile(a, st, all, keys);
    softmax_tile(a, st, maxima, sums);
    add_values_of_tile(a, st, all, values, out);
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
