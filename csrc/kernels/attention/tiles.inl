// Products of bf16 of attention/bf16.inl in tile registers. Included by a tier file after it, amx.inl and one of
// tiles_amx.h, tiles_emulated.h.
//
// A tile adds its products as two chains, of the even and of the odd columns, where vectors have one. So only the even
// columns are used: numbers stand in the lower halves of words whose upper halves are zeros, 16 of them in a row, in
// the order of a chain: 1, 0, 3, 2, ... Half the products of a tile are with zeros then; the rest are those of vectors,
// bit by bit. Register 4 has queries or probabilities of 16 queries, 5 - 7 keys or values, 0 - 3 sums.

namespace {

constexpr int kTileQueries = 16;
constexpr int kTileWords = 32;  // numbers of a row of a tile
constexpr int kTileNumbers = 16 * kTileWords;
constexpr int kPaddedQueries = kMaxQueries + kTileQueries;  // tiles may begin at any query

// Upper halves to lower ones.
inline vi low_words(vf x) { return andi(sar<16>(bits(x)), set1i(0xffff)); }
inline void store_words(uint16_t* to, vi words) { storei(reinterpret_cast<int32_t*>(to), words); }

// Sums 0 .. N - 1 += register 4 times the tiles at w, which lie `apart` numbers apart.
template <int N> inline void add_chains(const uint16_t* x, const uint16_t* w, int64_t apart) {
  tiles_see_memory();
  KT_TILE_LOAD(4, x, 64);
  KT_TILE_LOAD(5, w, 64);
  KT_TILE_DOT_BF16(0, 4, 5);
  if constexpr (N > 1) {
    KT_TILE_LOAD(6, w + apart, 64);
    KT_TILE_DOT_BF16(1, 4, 6);
  }
  if constexpr (N > 2) {
    KT_TILE_LOAD(7, w + 2 * apart, 64);
    KT_TILE_DOT_BF16(2, 4, 7);
  }
  if constexpr (N > 3) {
    KT_TILE_LOAD(5, w + 3 * apart, 64);
    KT_TILE_DOT_BF16(3, 4, 5);
  }
}

template <int N> inline void zero_sums() {
  KT_TILE_ZERO(0);
  if constexpr (N > 1) KT_TILE_ZERO(1);
  if constexpr (N > 2) KT_TILE_ZERO(2);
  if constexpr (N > 3) KT_TILE_ZERO(3);
}

// Sums lie `apart` floats apart, rows of each `stride`.
template <int N> inline void load_tile_sums(const float* from, int64_t apart, int64_t stride) {
  tiles_see_memory();
  KT_TILE_LOAD(0, from, 4 * stride);
  if constexpr (N > 1) KT_TILE_LOAD(1, from + apart, 4 * stride);
  if constexpr (N > 2) KT_TILE_LOAD(2, from + 2 * apart, 4 * stride);
  if constexpr (N > 3) KT_TILE_LOAD(3, from + 3 * apart, 4 * stride);
}

template <int N> inline void store_tile_sums(float* to, int64_t apart, int64_t stride) {
  KT_TILE_STORE(0, to, 4 * stride);
  if constexpr (N > 1) KT_TILE_STORE(1, to + apart, 4 * stride);
  if constexpr (N > 2) KT_TILE_STORE(2, to + 2 * apart, 4 * stride);
  if constexpr (N > 3) KT_TILE_STORE(3, to + 3 * apart, 4 * stride);
  tiles_see_memory();
}

class TileAttention {
 public:
  void start(const AttentionArgs& a, const SpanState& st) {
    rows_ = (st.count + kTileQueries - 1) / kTileQueries * kTileQueries;
    for (int k = 0; k < chains_of(a.dim_k); ++k)
      for (int i = 0; i < rows_; ++i) {
        uint16_t* to = q_ + (static_cast<int64_t>(k) * rows_ + i) * kTileWords;
        const vf q = i < st.count ? rounded_query(a, st.q[i], k * kChain) : zero();
        store_words(to, low_words(swap_neighbours(q)));
      }
  }

  void set_probabilities(int i, int sub, vf p) { store_words(p_[sub][i], low_words(swap_neighbours(p))); }

  void score(const AttentionArgs& a, SpanState& st, const TileRange& all) {
    tiles_begin(kTileQueries, 64);
    for (int sub = 0; sub < kSubTiles; ++sub) {
      if (!meets(all, sub, 1)) continue;
      int count = 1;
      while (sub + count < kSubTiles && meets(all, sub + count, 1)) ++count;
      for (int t = 0; t < count; ++t) stage_keys_of(a, st, sub + t, stage_.keys[t]);
      if (count == 4)
        score_tiles<4>(a, st, sub);
      else if (count == 3)
        score_tiles<3>(a, st, sub);
      else if (count == 2)
        score_tiles<2>(a, st, sub);
      else
        score_tiles<1>(a, st, sub);
      sub += count - 1;
    }
    tiles_end();
  }

  // As PairProducts::stage_values.
  bool stage_values(const SpanState& st, int d, int width, const TileRange& r) {
    vi largest = set1i(0);
    for (int at = 0; at < width; at += 16) {
      const int left = width - at < 16 ? width - at : 16;
      uint16_t* to = stage_.values[at / 16][0];
      for (int j = 0; j < kPositionTile; ++j)
        store_words(to + (j ^ 1) * kTileWords, low_words(value_at(st, j, r, d + at, left, &largest)));
    }
    return reduce_maxi(largest) < kNotFinite;
  }

  // As PairProducts::add_values.
  void add_values(SpanState& st, int width, int64_t stride, float* out, int i, int end) {
    tiles_begin(kTileQueries, 64);
    for (; i < end; i += kTileQueries) {
      const int rows = end - i < kTileQueries ? end - i : kTileQueries;
      const TileRange seen = seen_by_any(st, i, rows);
      if (seen.lo >= seen.hi) continue;
      st.next_keys.ask();
      for (int d = 0; d < width; d += 4 * 16) {
        const int left = width - d;
        float* to = out + i * stride + d;
        if (left > 48)
          add_tiles<4>(st, d, i, rows, left < 64 ? left : 64, seen, stride, to);
        else if (left > 32)
          add_tiles<3>(st, d, i, rows, left, seen, stride, to);
        else if (left > 16)
          add_tiles<2>(st, d, i, rows, left, seen, stride, to);
        else
          add_tiles<1>(st, d, i, rows, left, seen, stride, to);
      }
    }
    tiles_end();
  }

 private:
  // Keys of sub-tile `sub`, [chain][dimension][position].
  static void stage_keys_of(const AttentionArgs& a, const SpanState& st, int sub, uint16_t* to) {
    alignas(64) float pairs[16 * 16];  // of 32 dimensions
    for (int d = 0; d < a.dim_k; d += 32) {
      stage_words(st.k + 16 * sub, 2 * d, 2 * (a.dim_k - d < 32 ? a.dim_k - d : 32), pairs);
      for (int i = 0; i < 16; ++i, to += 2 * kTileWords) {
        const vi both = bits(load(pairs + i * 16));
        store_words(to, low_words(from_bits(both)));
        store_words(to + kTileWords, andi(both, set1i(0xffff)));
      }
    }
  }

  template <int N> void score_tiles(const AttentionArgs& a, SpanState& st, int sub) {
    for (int i = 0; i < rows_; i += kTileQueries) {
      const int count = st.count - i < kTileQueries ? st.count - i : kTileQueries;
      if (!meets(seen_by_any(st, i, count), sub, N)) continue;
      st.next_values.ask();
      zero_sums<N>();
      for (int k = 0; k < chains_of(a.dim_k); ++k)
        add_chains<N>(q_ + (static_cast<int64_t>(k) * rows_ + i) * kTileWords, stage_.keys[0] + k * kTileNumbers,
                      sizeof stage_.keys[0] / sizeof(uint16_t));
      store_tile_sums<N>(st.scores[sub][i], kApart, 16);
    }
  }

  // N blocks of 16 dimensions from d on, `width` in all, of up to 16 queries from i on: in a copy of outputs.
  template <int N>
  void add_tiles(const SpanState& st, int d, int i, int rows, int width, const TileRange& seen, int64_t stride,
                 float* out) {
    alignas(64) float sums[kTileQueries][16 * N];
    for (int c = 0; c < rows; ++c)
      for (int at = 0; at < width; at += 16) {
        const vf old = width - at < 16 ? load_n(out + c * stride + at, width - at) : load(out + c * stride + at);
        store(sums[c] + at, flushed(mul(old, flushed(set1(st.rescale[i + c])))));
      }
    for (int c = rows; c < kTileQueries; ++c)
      for (int at = 0; at < 16 * N; at += 16) store(sums[c] + at, zero());
    load_tile_sums<N>(sums[0], 16, 16 * N);
    for (int sub = seen.lo / 16; sub < (seen.hi + 15) / 16; ++sub)
      add_chains<N>(p_[sub][i], stage_.values[d / 16][sub], sizeof stage_.values[0] / sizeof(uint16_t));
    store_tile_sums<N>(sums[0], 16, 16 * N);
    for (int c = 0; c < rows; ++c)
      for (int at = 0; at < width; at += 16)
        if (width - at < 16)
          store_n(out + c * stride + at, load(sums[c] + at), width - at);
        else
          store(out + c * stride + at, load(sums[c] + at));
  }

  int rows_;                                            // of q_, a multiple of 16
  alignas(64) uint16_t q_[kMaxQueries * kMaxBf16Dims];  // [chain][query][row of a tile]
  alignas(64) uint16_t p_[kSubTiles][kPaddedQueries][kTileWords];
  union {
    alignas(64) uint16_t keys[kSubTiles][kMaxBf16Dims * kTileWords];            // [chain][dimension][position]
    alignas(64) uint16_t values[kBf16ValueDims / 16][kSubTiles][kTileNumbers];  // [position][dimension]
  } stage_;
};

void attention_span_bf16(const AttentionArgs& a, const AttentionSpan& span, float* maxima, float* sums, float* out) {
  span_with<TileAttention>(a, span, maxima, sums, out);
}

}  // namespace
