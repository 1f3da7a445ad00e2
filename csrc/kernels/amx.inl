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
constexpr int kFirstWeightTile = 5;

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

constexpr int kPlaneBytes = kTileCols * 16;
struct TilePlanes {
  alignas(64) uint8_t low[2 * kPlaneBytes];  // lines, then those of the upper plane
};

struct TileScales {
  alignas(64) int32_t m[8 * 16];  // [pair of sub-blocks][row], two int16
  alignas(64) float d[16], dmin[16];
};

// What registers 0 - 3 held.
struct TileSums { alignas(64) int32_t v[4][kTileTokens * 16]; };

// Registers 0 - 3 to memory, from `first` on.
inline void store_sums(TileSums& sums, int first) {
  if (first == 0) {
    KT_TILE_STORE(0, sums.v[0], 64);
    KT_TILE_STORE(1, sums.v[1], 64);
  }
  KT_TILE_STORE(2, sums.v[2], 64);
  KT_TILE_STORE(3, sums.v[3], 64);
}

// A unit of work fills the four registers of sums: of one tile of tokens and some weights. A slot is the units that
// share weights, `part` of them; a piece of 256 columns has a slot for every group of weights.
struct TileUnit {
  int slot = 0, piece = 0, group = 0, part = 0;
  void next_slot(int groups) {
    part = 0;
    ++slot;
    if (++group == groups) {
      group = 0;
      ++piece;
    }
  }
  void advance(int groups, int parts) {
    if (++part == parts) next_slot(groups);
  }
};

struct TileWork {
  int pieces, groups, parts;
  int slots() const { return pieces * groups; }
};

// Eighths of a slot's weights that are prepared before its first product. With one unit a slot, half of a slot is
// enough, and what is prepared takes the place of what was just multiplied: less of the first cache.
inline int prepared_ahead(const TileWork& work) { return work.parts == 1 ? 4 : 8; }

// All units in order, in stages so that the units for tiles, those for vectors and memory work side by side: while unit
// n is multiplied, the weights that come next are prepared, an eighth of a slot at a time, the sums of unit n - 1 leave
// the registers, and those of unit n - LAG are added to the accumulators. All of it goes in four steps, turn by turn,
// for the processor looks ahead no further than that. Four sums at a time, because a product waits 52 cycles for the
// one before in the same register while another can begin every 16; LAG, because what a tile stored cannot be loaded
// before it has come to the cache, which takes all that is in flight: the distance has to be longer than the
// processor's window.
template <int LAG, class Prepare, class Multiply, class Add>
inline void pipeline(const TileWork& work, const Prepare& prepare, const Multiply& multiply, const Add& add) {
  TileSums sums[LAG];
  TileUnit now, adding, coming;
  const int units = work.slots() * work.parts, steps = 4 * work.parts;
  int newest = LAG - 1, oldest = 0, eighth = 0, due = 0;
  const auto prepare_next = [&] {
    prepare(coming, eighth);
    if (++eighth < 8) return;
    eighth = 0;
    coming.next_slot(work.groups);
  };
  for (int i = 0; i < prepared_ahead(work); ++i) prepare_next();
  for (int n = 0; n < units + LAG; ++n) {
    TileSums* const done = n > 0 ? &sums[newest] : nullptr;
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      tiles_see_memory();
      if (n < units) multiply(now, done, step);
      if (n == units && step == 0) store_sums(*done, 0);
      for (due += 8; due >= steps; due -= steps)
        if (coming.slot < work.slots()) prepare_next();
      if (n >= LAG) add(adding, sums[oldest], step);
    }
    now.advance(work.groups, work.parts);
    if (n >= LAG) adding.advance(work.groups, work.parts);
    newest = oldest;
    oldest = oldest + 1 == LAG ? 0 : oldest + 1;
  }
}

// Tokens of a step of a unit.
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
  const uint8_t *at = nullptr, *end = nullptr;
  int64_t per_step = 0;
  NextLines() = default;
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

// Pieces of the tiles of a task, as they lie in memory.
struct TilePieces {
  const TileArgs* a;
  int count, pieces;
  int64_t head, piece_bytes, tile_bytes;

  // What is asked for of tile i for `piece`, or for one of the tile that follows.
  NextLines lines(int i, int piece, int steps) const {
    if (i >= count || piece >= 2 * pieces) return {};
    const uint8_t* tile = a[i].packed;
    int64_t first = head + piece * piece_bytes, bytes = piece_bytes;
    if (piece >= pieces) {
      tile = following_tile(a, count, i, tile_bytes);
      first -= pieces * piece_bytes;
      if (piece == pieces) {
        first = 0;
        bytes += head;
      }
    }
    return {tile + first, bytes, steps};
  }
};

constexpr int kSlotsAhead = 3;  // of the weights that are asked for

// ---- super-blocks of 256 ----

template <class P> struct PlaneShift { static constexpr int value = 8; };
template <> struct PlaneShift<PackedQ4K> { static constexpr int value = 3; };
template <> struct PlaneShift<PackedQ5K> { static constexpr int value = 3; };

template <class P> constexpr bool kIsTernary = std::is_same_v<P, PackedTQ1> || std::is_same_v<P, PackedTQ2>;
template <class P> constexpr bool kHasQuarters = !kHasGrid<P> && !kIsTernary<P>;  // others are split as a whole
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

// To `line` of the lower plane, and to the same of the upper one.
template <class P> inline void split_step(wb w, const PlaneScale<P>& scale, uint8_t* line) {
  wb low, high;
  if constexpr (kHasOnePlane<P> && P::F::has_min) {
    low = high = times(w, scale.low);
  } else if constexpr (PlaneShift<P>::value == 3) {
    low = times(w, scale.low);
    high = times(w, scale.high);
  } else {
    split_products(w, P::offset, scale.low, &low, &high);
  }
  store_wb(line, low);
  if constexpr (!kHasOnePlane<P>) store_wb(line + kPlaneBytes, high);
}

// Steps 16 g + I and 16 g + 8 + I and the following ones of the same sub-blocks, see packed_group.
template <class P, int I, int N>
inline void split_lines(const uint8_t* p, int g, const PlaneScale<P>& first, const PlaneScale<P>& second, uint8_t* to) {
  if constexpr (I < N) {
    const wb line = group_line<P>(p, g, I);
    const wb low = P::template low<I>(p, g, line), high = P::template high<I>(p, g, line);
    split_step<P>(low, first, to + 64 * I);
    split_step<P>(high, second, to + 64 * (8 + I));
    split_lines<P, I + 1, N>(p, g, first, second, to);
  }
}

template <class P> inline void split_group(const uint8_t* p, int g, TilePlanes& planes) {
  uint8_t* to = planes.low + 1024 * g;
  if constexpr (P::F::subs == 8) {
    const vi pair = load_scales<P>(p, g);
    split_lines<P, 0, 8>(p, g, PlaneScale<P>(lane_scale_low(pair)), PlaneScale<P>(lane_scale_high(pair)), to);
  } else {
    const vi first = load_scales<P>(p, 2 * g), second = load_scales<P>(p, 2 * g + 1);
    split_lines<P, 0, 4>(p, g, PlaneScale<P>(lane_scale_low(first)), PlaneScale<P>(lane_scale_low(second)), to);
    split_lines<P, 4, 8>(p, g, PlaneScale<P>(lane_scale_high(first)), PlaneScale<P>(lane_scale_high(second)), to);
  }
}

// Of a type with a grid.
template <class P> inline void split_grid(const uint8_t* p, TilePlanes& planes) {
  constexpr int steps = 64 / P::spec.subs;
  GridStage st;
  stage_grid<P, 0x80>(p, st);
  for (int s = 0; s < P::spec.subs; ++s) {
    const vi scale = both_halves(loadi(st.sc + 16 * s));
    for (int i = steps * s; i < steps * (s + 1); ++i) {
      wb low, high;
      split_products(load_wb(st.w + 64 * i), 128, scale, &low, &high);
      store_wb(planes.low + 64 * i, low);
      store_wb(planes.low + kPlaneBytes + 64 * i, high);
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

// Quarter g of a super-block; types that are not made in quarters are with the first.
template <class P>
inline void split_planes(const uint8_t* packed, int64_t at, int64_t b, int g, TilePlanes& planes, TileScales& scales) {
  const uint8_t* p = packed + at;
  if constexpr (kHasGrid<P>) {
    if (g == 0) split_grid<P>(p, planes);
  } else if constexpr (kIsTernary<P>) {
    if (g == 0) split_ternary<P>(p, planes);
  } else {
    split_group<P>(p, g, planes);
  }
  if (g > 0) return;
  if constexpr (kHasGrid<P>)
    store(scales.d, grid_d<P>(packed, b));
  else
    store(scales.d, P::F::has_min ? load_f16(p) : block_d(packed, b));
  if constexpr (P::F::has_min) {
    store(scales.dmin, load_f16(p + 32));
    for (int j = 0; j < P::F::subs / 2; ++j) storei(scales.m + 16 * j, load_minima<P>(p, j));
  }
}

// 64 columns of a tile of tokens, in register 4, times a plane. Before the first ones the register of sums is emptied.
#define KT_MULTIPLY_PLANE(SUM, WEIGHT, PLANE, IS_UNSIGNED)       \
  do {                                                           \
    if (g == 0) {                                                \
      if (done != nullptr) KT_TILE_STORE(SUM, done->v[SUM], 64); \
      KT_TILE_ZERO(SUM);                                         \
    }                                                            \
    KT_TILE_LOAD(WEIGHT, (PLANE) + 1024 * g, 64);                \
    if constexpr (IS_UNSIGNED)                                   \
      KT_TILE_DOT_UNSIGNED(SUM, 4, WEIGHT);                      \
    else                                                         \
      KT_TILE_DOT_SIGNED(SUM, 4, WEIGHT);                        \
  } while (false)

// Columns 64 g .. 64 g + 63 of a tile of tokens times one or two weights: low to registers 0 and 2, high to 1 and 3.
// What these held goes to `done`, if there is one.
template <class P>
inline void multiply_planes(const TilePlanes* planes, bool has_second, const int8_t (*q)[kTileCols], TileSums* done,
                            int g) {
  constexpr bool low_unsigned = !kHasOnePlane<P> || P::F::has_min, high_unsigned = PlaneShift<P>::value == 3;
  KT_TILE_LOAD(4, q[0] + 64 * g, kTileCols);
  KT_MULTIPLY_PLANE(0, 5, planes[0].low, low_unsigned);
  if constexpr (!kHasOnePlane<P>) KT_MULTIPLY_PLANE(1, 6, planes[0].low + kPlaneBytes, high_unsigned);
  if (!has_second) {
    if (g == 0 && done != nullptr) store_sums(*done, 2);
    return;
  }
  KT_MULTIPLY_PLANE(2, 7, planes[1].low, low_unsigned);
  if constexpr (!kHasOnePlane<P>) KT_MULTIPLY_PLANE(3, 5, planes[1].low + kPlaneBytes, high_unsigned);
}
#undef KT_MULTIPLY_PLANE

// Adds one super-block of W weights to the accumulators of tokens first .. end - 1, whose sums begin at row `at`.
template <class P, int W>
inline void add_planes(const TileScales* scales, const TokenPiece& rows, TokenRange tokens, int at,
                       const TileSums& sums, float* const* acc) {
  using F = typename P::F;
  constexpr int pairs = F::subs / 2;
  vf d[W], dmin[W];
  vi m[W][pairs];
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w) {
    d[w] = load(scales[w].d);
    dmin[w] = F::has_min ? load(scales[w].dmin) : zero();
    if constexpr (F::has_min)
#pragma GCC unroll 8
      for (int j = 0; j < pairs; ++j) m[w][j] = loadi(scales[w].m + 16 * j);
  }
  const auto add_token = [&](int t, int i) {
    const vf da = set1(rows.d[t][0]);
    vf total[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      vi isum = loadi(sums.v[2 * w] + 16 * (at + i)), msum = set1i(0);
      if constexpr (std::is_same_v<P, PackedQ3K>) isum = subi(set1i(0), isum);
      if constexpr (!kHasOnePlane<P>)
        isum = addi(shl<PlaneShift<P>::value>(loadi(sums.v[2 * w + 1] + 16 * (at + i))), isum);
      if constexpr (F::has_min) {
        const int16_t* sums_of_subs = F::subs == 16 ? rows.sums16[t] : rows.sums[t];
#pragma GCC unroll 8
        for (int j = 0; j < pairs; ++j) msum = pair_dot(msum, m[w][j], sums_of_subs + 2 * j);
      }
      total[w] = add_super<F>(load(acc[w] + 16 * t), d[w], dmin[w], da, isum, msum);
    }
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) store(acc[w] + 16 * t, total[w]);
  };
  if (tokens.end - tokens.first == 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add_token(tokens.first + i, i);
  } else {
    for (int t = tokens.first; t < tokens.end; ++t) add_token(t, t - tokens.first);
  }
}

constexpr int kPlanesLag = 2;

// All columns of `count` tiles of weights of one type, two at a time.
template <class P> void amx256_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  const int blocks = static_cast<int>(a->k / 256);
  const int64_t head = P::F::has_min ? 0 : head_bytes(blocks);
  const TileWork work = {blocks, (count + 1) / 2, tiles.count};
  const TilePieces memory = {a, count, blocks, head, P::bytes, head + blocks * P::bytes};
  const int turn =
      prepared_ahead(work) < 8 && kHasQuarters<P> ? 0 : 1;  // 1: two slots in turn have planes of their own
  TilePlanes planes[2][2];
  TileScales scales[4][2];  // from one slot before that of the products to kPlanesLag units after
  NextLines next[2];
  TokenPiece multiplied(*a->blocks, 0), added(*a->blocks, 0);
  const auto prepare = [&](const TileUnit& slot, int eighth) {
    const int i = 2 * slot.group + eighth % 2;
    if (i < count)
      split_planes<P>(a[i].packed, head + slot.piece * P::bytes, slot.piece, eighth / 2,
                      planes[slot.slot & turn][eighth % 2], scales[slot.slot & 3][eighth % 2]);
  };
  const auto multiply = [&](const TileUnit& unit, TileSums* done, int step) {
    if (unit.part == 0 && step == 0) {
      TileUnit ahead = unit;
      for (int s = 0; s < kSlotsAhead; ++s) ahead.next_slot(work.groups);
      for (int j = 0; j < 2; ++j) next[j] = memory.lines(2 * ahead.group + j, ahead.piece, 4 * tiles.count);
    }
    if (step == 0) multiplied = TokenPiece(*a->blocks, unit.piece);
    multiply_planes<P>(planes[unit.slot & turn], 2 * unit.group + 1 < count, multiplied.q + unit.part * tiles.height,
                       done, step);
    next[0].fetch();
    next[1].fetch();
  };
  const auto add = [&](const TileUnit& unit, const TileSums& sums, int step) {
    const TokenRange tokens(tiles, unit.part, step, a->num_tokens);
    if (step == 0) added = TokenPiece(*a->blocks, unit.piece);
    const int i = 2 * unit.group, at = tokens.first - unit.part * tiles.height;
    const TileScales* of = scales[unit.slot & 3];
    float* const acc[2] = {a[i].acc, i + 1 < count ? a[i + 1].acc : nullptr};
    if (i + 1 < count)
      add_planes<P, 2>(of, added, tokens, at, sums, acc);
    else
      add_planes<P, 1>(of, added, tokens, at, sums, acc);
  };
  tiles_begin(tiles.height, 64, kFirstWeightTile);
  pipeline<kPlanesLag>(work, prepare, multiply, add);
  tiles_end();
}

}  // namespace
