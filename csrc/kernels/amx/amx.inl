// Re-laid weights times many activation rows in tile registers. Included by a tier file after packed.inl and one of
// tiles_amx.h, tiles_emulated.h; the results are those of gemm.inl, bit by bit, because all integer sums are exact.
//
// A line of packed.inl is a row of a weight tile as it stands. What a tile cannot do is to scale the products of a
// sub-block, so scales are multiplied into the weights, which then take two planes of bytes:
//   Q4_K, Q5_K   sc = 8 a + b with a, b < 8:   sum sc q y = 8 sum (a q) y + sum (b q) y,   a q and b q at most 217
//   others       the 16 bits of sc q, q with its offset, upper half signed:   sum sc q y = 256 sum hi y + sum lo y
// or one, where the products fit in a byte: sc q of Q2_K, at most 45; -sc (q - 4) of Q3_K, from -128 to 124; q - 1 of
// TQ1_0 and TQ2_0.
// Blocks of 32 have one scale each: their sums leave the registers after every block.

namespace {

constexpr int kTileTokens = 16;     // rows of a tile
constexpr int kMinTileTokens = 10;  // fewer are faster without tiles

// Tokens in tiles of equal height: 17 are 9 + 8, for a tile costs what its height is.
struct TokenTiles {
  int count, height;
  explicit TokenTiles(int tokens)
      : count((tokens + kTileTokens - 1) / kTileTokens), height((tokens + count - 1) / count) {}
};

// A piece of TokenBlocks.
struct TokenPiece {
  const int8_t (*q)[kTileCols];
  const int16_t (*sums)[8];
  const int16_t (*sums16)[16];
  const float (*d)[8];
  TokenPiece(const TokenBlocks& blocks, int64_t piece)
      : q(reinterpret_cast<const int8_t (*)[kTileCols]>(blocks.q + piece * blocks.rows * kTileCols)),
        sums(reinterpret_cast<const int16_t (*)[8]>(blocks.sums + piece * blocks.rows * 8)),
        sums16(reinterpret_cast<const int16_t (*)[16]>(blocks.sums16 + piece * blocks.rows * 16)),
        d(reinterpret_cast<const float (*)[8]>(blocks.d + piece * blocks.rows * 8)) {}
};

struct TilePlanes {
  alignas(64) uint8_t low[kTileCols * 16], high[kTileCols * 16];  // lines
};

struct TileScales {
  alignas(64) int32_t m[8 * 16];  // [pair of sub-blocks][row], two int16
  alignas(64) float d[16], dmin[16];
};

// Two tiles of sums, low and high, or of two blocks.
struct TileSums { alignas(64) int32_t v[2][kTileTokens * 16]; };

// Registers 0 and 1, or 2 and 3, to memory.
inline void store_sums(int set, TileSums& sums) {
  if (set == 0) {
    KT_TILE_STORE(0, sums.v[0], 64);
    KT_TILE_STORE(1, sums.v[1], 64);
  } else {
    KT_TILE_STORE(2, sums.v[0], 64);
    KT_TILE_STORE(3, sums.v[1], 64);
  }
}

// A tile of tokens times a tile of weights (or a pair of blocks of one).
struct TileItem {
  int weight = 0, token = 0;  // which tiles
  void advance(int token_tiles) {
    if (++token == token_tiles) {
      token = 0;
      ++weight;
    }
  }
};

// Products of one item after the other, in three stages, so that neither the units for tiles nor those for vectors
// wait: item n is multiplied, the sums of item n - 1 are stored, those of item n - 2 are added to the accumulators. All
// of it goes in four steps, turn by turn, for the processor looks ahead no further than that.
template <class Multiply, class Add>
inline void pipeline(int weights, int token_tiles, const Multiply& multiply, const Add& add) {
  TileSums sums[2];
  TileItem item, adding;
  const int items = weights * token_tiles;
  for (int n = 0; n < items + 2; ++n) {
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      if (n < items) multiply(item, n & 1, step);
      if (step == 2 && n >= 1 && n <= items) store_sums((n - 1) & 1, sums[(n - 1) & 1]);
      if (n >= 2) add(adding, sums[n & 1], step);
    }
    item.advance(token_tiles);
    if (n >= 2) adding.advance(token_tiles);
  }
}

// Tokens of a step of an item.
struct TokenRange {
  int first, end;
  TokenRange(const TokenTiles& tiles, int tile, int step, int num_tokens)
      : first(tile * tiles.height + tiles.height * step / 4), end(tile * tiles.height + tiles.height * (step + 1) / 4) {
    if (end > num_tokens) end = num_tokens;
  }
};

// Asks for the weights that come next, some lines in every step: a core has few requests for memory under way at a
// time, and would wait for them if all were made at once.
struct NextLines {
  const uint8_t *at, *end;
  int64_t per_step;
  NextLines(const uint8_t* first, int64_t bytes, int steps)
      : at(first), end(first + bytes), per_step((bytes / 64 + steps - 1) / steps) {}
  void fetch() {
    for (int64_t i = 0; i < per_step && at < end; ++i, at += 64) __builtin_prefetch(at);
  }
};

// Where tile i of a task continues once its columns are done: as many tiles on as stand side by side in the task.
inline const uint8_t* following_tile(const TileArgs* a, int count, int i, int64_t tile_bytes) {
  int run = 1;
  while (run < count && a[run].packed == a[0].packed + run * tile_bytes) ++run;
  return a[i].packed + run * tile_bytes;
}

// ---- super-blocks of 256 ----

template <class P> struct PlaneShift { static constexpr int value = 8; };
template <> struct PlaneShift<PackedQ4K> { static constexpr int value = 3; };
template <> struct PlaneShift<PackedQ5K> { static constexpr int value = 3; };

template <class P> constexpr bool kIsTernary = std::is_same_v<P, PackedTQ1> || std::is_same_v<P, PackedTQ2>;
template <class P>
constexpr bool kHasOnePlane = std::is_same_v<P, PackedQ2K> || std::is_same_v<P, PackedQ3K> || kIsTernary<P>;

// A scale as multiplication wants it: its two digits, or itself, or less itself.
template <class P> struct PlaneScale {
  vi low, high;
  explicit PlaneScale(vi scale) {
    if constexpr (PlaneShift<P>::value == 3) {
      low = both_halves(andi(scale, set1i(7)));
      high = both_halves(shr3(scale));
    } else if constexpr (std::is_same_v<P, PackedQ3K>) {
      low = high = both_halves(subi(set1i(0), scale));
    } else {
      low = high = both_halves(scale);
    }
  }
};

template <class P> inline void split_step(wb w, const PlaneScale<P>& scale, TilePlanes& planes, int step) {
  wb low, high;
  if constexpr (kHasOnePlane<P> && P::F::has_min) {
    low = high = times(w, scale.low);
  } else if constexpr (PlaneShift<P>::value == 3) {
    low = times(w, scale.low);
    high = times(w, scale.high);
  } else {
    split_products(w, P::offset, scale.low, &low, &high);
  }
  store_wb(planes.low + 64 * step, low);
  if constexpr (!kHasOnePlane<P>) store_wb(planes.high + 64 * step, high);
}

// Steps 16 g + I and 16 g + 8 + I and the following ones of the same sub-blocks, see packed_group.
template <class P, int I, int N>
inline void split_lines(const uint8_t* p, int g, const PlaneScale<P>& first, const PlaneScale<P>& second,
                        TilePlanes& planes) {
  if constexpr (I < N) {
    const wb line = group_line<P>(p, g, I);
    const wb low = P::template low<I>(p, g, line), high = P::template high<I>(p, g, line);
    split_step<P>(low, first, planes, 16 * g + I);
    split_step<P>(high, second, planes, 16 * g + 8 + I);
    split_lines<P, I + 1, N>(p, g, first, second, planes);
  }
}

template <class P> inline void split_group(const uint8_t* p, int g, TilePlanes& planes) {
  if constexpr (P::F::subs == 8) {
    const vi pair = load_scales<P>(p, g);
    split_lines<P, 0, 8>(p, g, PlaneScale<P>(lane_scale_low(pair)), PlaneScale<P>(lane_scale_high(pair)), planes);
  } else {
    const vi first = load_scales<P>(p, 2 * g), second = load_scales<P>(p, 2 * g + 1);
    split_lines<P, 0, 4>(p, g, PlaneScale<P>(lane_scale_low(first)), PlaneScale<P>(lane_scale_low(second)), planes);
    split_lines<P, 4, 8>(p, g, PlaneScale<P>(lane_scale_high(first)), PlaneScale<P>(lane_scale_high(second)), planes);
  }
}

// Of a type with a grid.
template <class P> inline void split_grid(const uint8_t* p, TilePlanes& planes) {
  constexpr int steps = 64 / P::spec.subs;
  GridStage st;
  stage_grid<P, 0x80>(p, st, kHasVbmi);
  for (int s = 0; s < P::spec.subs; ++s) {
    const vi scale = both_halves(loadi(st.sc + 16 * s));
    for (int i = steps * s; i < steps * (s + 1); ++i) {
      wb low, high;
      split_products(load_wb(st.w + 64 * i), 128, scale, &low, &high);
      store_wb(planes.low + 64 * i, low);
      store_wb(planes.high + 64 * i, high);
    }
  }
}

template <class P> inline void split_ternary(const uint8_t* p, TilePlanes& planes) {
  const auto keep = [&](int, int step, wb codes) {
    wb low, high;
    split_products(codes, 1, both_halves(set1i(1)), &low, &high);
    store_wb(planes.low + 64 * step, low);
  };
  P::template half<0>(p, keep);
  P::template half<1>(p, keep);
}

template <class P>
inline void split_planes(const uint8_t* packed, const uint8_t* p, int64_t b, TilePlanes& planes, TileScales& scales) {
  if constexpr (kHasGrid<P>) {
    split_grid<P>(p, planes);
    store(scales.d, grid_d<P>(packed, b));
  } else {
    if constexpr (kIsTernary<P>)
      split_ternary<P>(p, planes);
    else
      for (int g = 0; g < 4; ++g) split_group<P>(p, g, planes);
    store(scales.d, super_d<P>(packed, p, b));
  }
  if constexpr (P::F::has_min) {
    store(scales.dmin, load_f16(p + 32));
    for (int j = 0; j < P::F::subs / 2; ++j) storei(scales.m + 16 * j, load_minima<P>(p, j));
  }
}

// 64 columns of a tile of tokens times both planes: low to the first sum of the set, high to the second, whose numbers
// are immediates.
#define KT_MULTIPLY_PLANES(LOW, HIGH)            \
  do {                                           \
    if (g == 0) {                                \
      KT_TILE_ZERO(LOW);                         \
      KT_TILE_ZERO(HIGH);                        \
    }                                            \
    KT_TILE_LOAD(4, q[0] + 64 * g, kTileCols);   \
    KT_TILE_LOAD(6, planes.low + 1024 * g, 64);  \
    if constexpr (kHasOnePlane<P>) {             \
      if constexpr (P::F::has_min)               \
        KT_TILE_DOT_UNSIGNED(LOW, 4, 6);         \
      else                                       \
        KT_TILE_DOT_SIGNED(LOW, 4, 6);           \
      break;                                     \
    }                                            \
    KT_TILE_DOT_UNSIGNED(LOW, 4, 6);             \
    KT_TILE_LOAD(7, planes.high + 1024 * g, 64); \
    if constexpr (PlaneShift<P>::value == 3)     \
      KT_TILE_DOT_UNSIGNED(HIGH, 4, 7);          \
    else                                         \
      KT_TILE_DOT_SIGNED(HIGH, 4, 7);            \
  } while (false)

template <class P> inline void multiply_planes(int set, const TilePlanes& planes, const int8_t (*q)[kTileCols], int g) {
  if (set == 0)
    KT_MULTIPLY_PLANES(0, 1);
  else
    KT_MULTIPLY_PLANES(2, 3);
}
#undef KT_MULTIPLY_PLANES

// Adds one super-block to the accumulators of tokens first .. end - 1, whose sums begin at row `at`.
template <class P>
inline void add_planes(const TileScales& scales, const TokenPiece& rows, int first, int end, int at,
                       const TileSums& sums, float* acc) {
  using F = typename P::F;
  const vf d = load(scales.d), dmin = F::has_min ? load(scales.dmin) : zero();
  constexpr int pairs = F::subs / 2;
  vi m[pairs];
  if constexpr (F::has_min)
    for (int j = 0; j < pairs; ++j) m[j] = loadi(scales.m + 16 * j);
  const int32_t *low = sums.v[0] + 16 * at, *high = sums.v[1] + 16 * at;
  const auto add_token = [&](int t, int i) {
    vi isum = loadi(low + 16 * i), msum = set1i(0);
    if constexpr (std::is_same_v<P, PackedQ3K>) isum = subi(set1i(0), isum);
    if constexpr (!kHasOnePlane<P>) isum = addi(shl<PlaneShift<P>::value>(loadi(high + 16 * i)), isum);
    if constexpr (F::has_min) {
      const int16_t* sums_of_subs = F::subs == 16 ? rows.sums16[t] : rows.sums[t];
#pragma GCC unroll 8
      for (int j = 0; j < pairs; ++j) msum = pair_dot(msum, m[j], sums_of_subs + 2 * j);
    }
    store(acc + 16 * t, add_super<F>(load(acc + 16 * t), d, dmin, set1(rows.d[t][0]), isum, msum));
  };
  if (end - first == 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add_token(first + i, i);
  } else {
    for (int t = first; t < end; ++t) add_token(t, t - first);
  }
}

// Super-block b of `count` tiles of weights of one type.
template <class P>
void amx256_block(const TileArgs* a, int count, const TokenPiece& rows, const TokenTiles& tiles, int64_t b) {
  const int64_t blocks = a->k / 256, head = super_head<P>(blocks), at = head + b * P::bytes;
  TilePlanes planes[2];
  TileScales scales[4];  // an item's are read two items later
  NextLines next(nullptr, 0, 1);
  const auto multiply = [&](TileItem item, int set, int step) {
    const int i = item.weight;
    if (item.token == 0 && step == 0) {
      const uint8_t* block = a[i].packed + at;
      split_planes<P>(a[i].packed, block, b, planes[i & 1], scales[i & 3]);
      tiles_see_memory();
      next = b + 1 < blocks
                 ? NextLines(block + P::bytes, P::bytes, 4 * tiles.count)
                 : NextLines(following_tile(a, count, i, head + blocks * P::bytes), head + P::bytes, 4 * tiles.count);
    }
    multiply_planes<P>(set, planes[i & 1], rows.q + item.token * tiles.height, step);
    next.fetch();
  };
  const auto add = [&](TileItem item, const TileSums& sums, int step) {
    const TokenRange tokens(tiles, item.token, step, a->num_tokens);
    add_planes<P>(scales[item.weight & 3], rows, tokens.first, tokens.end, tokens.first - item.token * tiles.height,
                  sums, a[item.weight].acc);
  };
  pipeline(count, tiles.count, multiply, add);
}

template <class P> void amx256_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  tiles_begin(tiles.height, 64);
  for (int64_t b = 0; b < a->k / 256; ++b) amx256_block<P>(a, count, TokenPiece(*a->blocks, b), tiles, b);
  tiles_end();
}

}  // namespace
