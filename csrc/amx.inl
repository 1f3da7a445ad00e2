// Re-laid weights times many activation rows in tile registers. Included by a tier file after packed.inl and one of
// tiles_amx.h, tiles_emulated.h; the results are those of gemm.inl, bit by bit, because all integer sums are exact.
//
// A line of packed.inl is a row of a weight tile as it stands. What a tile cannot do is to scale the products of a
// sub-block, so scales are multiplied into the weights, which then take two planes of bytes:
//   Q4_K, Q5_K   sc = 8 a + b with a, b < 8:   sum sc q y = 8 sum (a q) y + sum (b q) y,   a q and b q at most 217
//   Q6_K, IQ4_XS the 16 bits of sc q, upper half signed:   sum sc q y = 256 sum hi y + sum lo y
// Blocks of 32 have one scale each: their sums leave the registers after every block.

namespace {

constexpr int kTileTokens = 16;    // rows of a tile
constexpr int kTileBatch = 128;    // tokens whose activations are gathered at a time
constexpr int kMinTileTokens = 5;  // fewer are faster without tiles

// Tokens in tiles of equal height: 17 are 9 + 8, for a tile costs what its height is.
struct TokenTiles {
  int count, height;
  explicit TokenTiles(int tokens)
      : count((tokens + kTileTokens - 1) / kTileTokens), height((tokens + count - 1) / count) {}
};

struct GatheredRows {
  alignas(64) int8_t q[kTileBatch][kTileCols];  // what stands behind the last token is never used
  int64_t row[kTileBatch];

  GatheredRows(const TileArgs& a) {
    for (int t = 0; t < a.num_tokens; ++t) row[t] = token_row(a, t);
  }
  void gather(const TileArgs& a, int64_t first, int cols) {
    for (int t = 0; t < a.num_tokens; ++t) std::memcpy(q[t], a.act.q + row[t] * a.act.ldq + first, static_cast<size_t>(cols));
  }
};

struct TilePlanes {
  alignas(64) uint8_t low[kTileCols * 16], high[kTileCols * 16];  // lines
  alignas(64) int32_t m[8 * 16];                                  // [pair of sub-blocks][row], two int16
  alignas(64) float d[16], dmin[16] = {};
};

struct TileSums {
  alignas(64) int32_t v[4][kTileTokens * 16];
};

// ---- super-blocks of 256 ----

template <class P> struct PlaneShift { static constexpr int value = 8; };
template <> struct PlaneShift<PackedQ4K> { static constexpr int value = 3; };
template <> struct PlaneShift<PackedQ5K> { static constexpr int value = 3; };

// The scales of steps 16 g + I .. and 16 g + 8 + I .., see packed_group.
template <class P, int I> inline void group_scales(const uint8_t* p, int g, vi* low, vi* high) {
  if constexpr (P::F::subs == 8) {
    const vi pair = load_scales<P>(p, g);
    *low = lane_scale_low(pair);
    *high = lane_scale_high(pair);
  } else {
    const vi first = load_scales<P>(p, 2 * g), second = load_scales<P>(p, 2 * g + 1);
    *low = I < 4 ? lane_scale_low(first) : lane_scale_high(first);
    *high = I < 4 ? lane_scale_low(second) : lane_scale_high(second);
  }
}

template <class P> inline void split_step(wb w, vi scale, TilePlanes& planes, int step) {
  if constexpr (PlaneShift<P>::value == 3) {
    store_wb(planes.high + 64 * step, times(w, both_halves(shr3(scale))));
    store_wb(planes.low + 64 * step, times(w, both_halves(andi(scale, set1i(7)))));
  } else {
    wb low, high;
    split_products(w, both_halves(andi(scale, set1i(0xffff))), &low, &high);
    store_wb(planes.low + 64 * step, low);
    store_wb(planes.high + 64 * step, high);
  }
}

template <class P, int I> inline void split_group(const uint8_t* p, int g, TilePlanes& planes) {
  if constexpr (I < 8) {
    vi low_scale, high_scale;
    group_scales<P, I>(p, g, &low_scale, &high_scale);
    const wb line = load_wb(p + P::lines + 64 * (8 * g + I));
    __builtin_prefetch(p + P::lines + 64 * (8 * g + I) + P::bytes);
    split_step<P>(P::template low<I>(p, g, line), low_scale, planes, 16 * g + I);
    split_step<P>(P::template high<I>(p, g, line), high_scale, planes, 16 * g + 8 + I);
    split_group<P, I + 1>(p, g, planes);
  }
}

template <class P> inline void split_planes(const uint8_t* packed, const uint8_t* p, int64_t b, TilePlanes& planes) {
  for (int g = 0; g < 4; ++g) split_group<P, 0>(p, g, planes);
  for (int j = 0; j < P::F::subs / 2; ++j) storei(planes.m + 16 * j, load_minima<P>(p, j));
  for (int64_t o = 0; o < P::lines; o += 64) __builtin_prefetch(p + o + P::bytes);
  store(planes.d, P::F::has_min ? load_f16(p) : block_d(packed, b));
  if (P::F::has_min) store(planes.dmin, load_f16(p + 32));
}

// One or two tiles of tokens times both planes: sums 0 and 1 are low and high of the first tile, 2 and 3 of the second.
template <class P>
inline void multiply_planes(const TilePlanes& planes, const int8_t (*q)[kTileCols], const int8_t (*q2)[kTileCols], TileSums& sums) {
  KT_TILE_ZERO(0);
  KT_TILE_ZERO(1);
  KT_TILE_ZERO(2);
  KT_TILE_ZERO(3);
  tiles_see_memory();
  for (int g = 0; g < 4; ++g) {
    KT_TILE_LOAD(4, q[0] + 64 * g, kTileCols);
    KT_TILE_LOAD(6, planes.low + 1024 * g, 64);
    KT_TILE_LOAD(7, planes.high + 1024 * g, 64);
    KT_TILE_DOT_UNSIGNED(0, 4, 6);
    if constexpr (PlaneShift<P>::value == 3)
      KT_TILE_DOT_UNSIGNED(1, 4, 7);
    else
      KT_TILE_DOT_SIGNED(1, 4, 7);
    if (q2 == nullptr) continue;
    KT_TILE_LOAD(5, q2[0] + 64 * g, kTileCols);
    KT_TILE_DOT_UNSIGNED(2, 5, 6);
    if constexpr (PlaneShift<P>::value == 3)
      KT_TILE_DOT_UNSIGNED(3, 5, 7);
    else
      KT_TILE_DOT_SIGNED(3, 5, 7);
  }
  KT_TILE_STORE(0, sums.v[0], 64);
  KT_TILE_STORE(1, sums.v[1], 64);
  if (q2 == nullptr) return;
  KT_TILE_STORE(2, sums.v[2], 64);
  KT_TILE_STORE(3, sums.v[3], 64);
}

// Adds one super-block to the accumulators of tokens first .. first + count - 1, whose sums are low and high.
template <class P>
inline void add_planes(const TileArgs& a, const TilePlanes& planes, const GatheredRows& rows, int64_t b, int first, int count,
                       const int32_t* low, const int32_t* high) {
  using F = typename P::F;
  const vf d = load(planes.d), dmin = load(planes.dmin);
  vi m[F::subs / 2];
  for (int j = 0; j < F::subs / 2; ++j) m[j] = loadi(planes.m + 16 * j);
  for (int t = 0; t < count; ++t) {
    const int64_t row = rows.row[first + t];
    const int16_t* sums = a.act.sums + row * a.act.lds + b * kSumsPerSuper + (F::subs == 8 ? 16 : 0);
    const vi isum = addi(shl<PlaneShift<P>::value>(loadi(high + 16 * t)), loadi(low + 16 * t));
    vi msum = set1i(0);
    for (int j = 0; j < F::subs / 2; ++j) msum = pair_dot(msum, m[j], sums + 2 * j);
    float* acc = a.acc + (first + t) * 16;
    store(acc, add_super<F>(load(acc), d, dmin, set1(a.act.d[row * a.act.ldd + b]), isum, msum));
  }
}

template <class P> void amx256_block(const TileArgs& a, const GatheredRows& rows, const TokenTiles& tiles, int64_t b) {
  const int64_t blocks = a.k / 256;
  TilePlanes planes;
  TileSums sums;
  split_planes<P>(a.packed, a.packed + (P::F::has_min ? 0 : head_bytes(blocks)) + b * P::bytes, b, planes);
  for (int i = 0; i < tiles.count; i += 2) {
    const int first = i * tiles.height, second = first + tiles.height;
    const bool has_second = i + 1 < tiles.count;
    multiply_planes<P>(planes, rows.q + first, has_second ? rows.q + second : nullptr, sums);
    add_planes<P>(a, planes, rows, b, first, a.num_tokens - first < tiles.height ? a.num_tokens - first : tiles.height, sums.v[0], sums.v[1]);
    if (has_second)
      add_planes<P>(a, planes, rows, b, second, a.num_tokens - second < tiles.height ? a.num_tokens - second : tiles.height,
                    sums.v[2], sums.v[3]);
  }
}

void amx256_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  GatheredRows rows(*a);
  tiles_begin(tiles.height, 64);
  for (int64_t b = 0; b < a->k / 256; ++b) {
    rows.gather(*a, b * 256, 256);
    for (int i = 0; i < count; ++i) switch (a[i].type) {
        case QType::Q4_K: amx256_block<PackedQ4K>(a[i], rows, tiles, b); break;
        case QType::Q5_K: amx256_block<PackedQ5K>(a[i], rows, tiles, b); break;
        case QType::IQ4_XS: amx256_block<PackedIQ4XS>(a[i], rows, tiles, b); break;
        default: amx256_block<PackedQ6K>(a[i], rows, tiles, b);
      }
  }
  tiles_end();
}

// ---- blocks of 32 ----

// Two blocks, from column 32 * at of the gathered ones on: sums 0 and 1 of the first tile of tokens, 2 and 3 of the second.
template <bool SIGNED>
inline void multiply_blocks(const uint8_t* w0, const uint8_t* w1, const int8_t* q, const int8_t* q2, TileSums& sums) {
  KT_TILE_ZERO(0);
  KT_TILE_ZERO(1);
  KT_TILE_ZERO(2);
  KT_TILE_ZERO(3);
  tiles_see_memory();
  KT_TILE_LOAD(6, w0, 64);
  KT_TILE_LOAD(7, w1, 64);
  KT_TILE_LOAD(4, q, kTileCols);
  KT_TILE_LOAD(5, q + 32, kTileCols);
  if constexpr (SIGNED) {
    KT_TILE_DOT_SIGNED(0, 4, 6);
    KT_TILE_DOT_SIGNED(1, 5, 7);
  } else {
    KT_TILE_DOT_UNSIGNED(0, 4, 6);
    KT_TILE_DOT_UNSIGNED(1, 5, 7);
  }
  KT_TILE_STORE(0, sums.v[0], 64);
  KT_TILE_STORE(1, sums.v[1], 64);
  if (q2 == nullptr) return;
  KT_TILE_LOAD(4, q2, kTileCols);
  KT_TILE_LOAD(5, q2 + 32, kTileCols);
  if constexpr (SIGNED) {
    KT_TILE_DOT_SIGNED(2, 4, 6);
    KT_TILE_DOT_SIGNED(3, 5, 7);
  } else {
    KT_TILE_DOT_UNSIGNED(2, 4, 6);
    KT_TILE_DOT_UNSIGNED(3, 5, 7);
  }
  KT_TILE_STORE(2, sums.v[2], 64);
  KT_TILE_STORE(3, sums.v[3], 64);
}

template <class P>
inline void add_blocks(const TileArgs& a, const GatheredRows& rows, int64_t b, int num_blocks, int first, int height, const int32_t* sum0,
                       const int32_t* sum1) {
  const vf d0 = P::scale(a.packed, b), d1 = num_blocks > 1 ? P::scale(a.packed, b + 1) : zero();
  const int count = a.num_tokens - first < height ? a.num_tokens - first : height;
  for (int t = 0; t < count; ++t) {
    const int64_t row = rows.row[first + t];
    const float* da = a.act.d + row * a.act.ldd + b;
    const int16_t* s = a.act.sums + row * a.act.lds + b;
    vf acc = load(a.acc + (first + t) * 16);
    vi isum = loadi(sum0 + 16 * t);
    if constexpr (!P::is_tile_signed) isum = addi(isum, set1i(-P::tile_offset * s[0]));
    acc = add(acc, mul(mul(d0, set1(da[0])), to_float(isum)));
    if (num_blocks > 1) {
      isum = loadi(sum1 + 16 * t);
      if constexpr (!P::is_tile_signed) isum = addi(isum, set1i(-P::tile_offset * s[1]));
      acc = add(acc, mul(mul(d1, set1(da[1])), to_float(isum)));
    }
    store(a.acc + (first + t) * 16, acc);
  }
}

// Blocks first .. first + count - 1, at most 8, whose columns are gathered.
template <class P>
void amx32_blocks(const TileArgs& a, const GatheredRows& rows, const TokenTiles& tiles, int64_t first, int count) {
  alignas(64) uint8_t steps[2][512];
  TileSums sums;
  const uint8_t* p = a.packed + P::head(a.k / 32) + first * P::bytes;
  for (int b = 0; b < count; b += 2, p += 2 * P::bytes) {
    const int pair = count - b < 2 ? 1 : 2;
    for (int64_t o = 0; o < 2 * P::bytes; o += 64) __builtin_prefetch(p + o + kAheadPacked);
    const uint8_t* w0 = P::tile_lines(p, steps[0]);
    const uint8_t* w1 = pair < 2 ? w0 : P::tile_lines(p + P::bytes, steps[1]);
    for (int i = 0; i < tiles.count; i += 2) {
      const int at = i * tiles.height, second = at + tiles.height;
      const bool has_second = i + 1 < tiles.count;
      multiply_blocks<P::is_tile_signed>(w0, w1, rows.q[at] + 32 * b, has_second ? rows.q[second] + 32 * b : nullptr, sums);
      add_blocks<P>(a, rows, first + b, pair, at, tiles.height, sums.v[0], sums.v[1]);
      if (has_second) add_blocks<P>(a, rows, first + b, pair, second, tiles.height, sums.v[2], sums.v[3]);
    }
  }
}

void amx32_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  GatheredRows rows(*a);
  tiles_begin(tiles.height, 32);
  const int64_t blocks = a->k / 32;
  for (int64_t b = 0; b < blocks; b += 8) {
    const int some = static_cast<int>(blocks - b < 8 ? blocks - b : 8);
    rows.gather(*a, b * 32, 32 * some);
    for (int i = 0; i < count; ++i) switch (a[i].type) {
        case QType::Q8_0: amx32_blocks<PackedQ8_0>(a[i], rows, tiles, b, some); break;
        case QType::MXFP4: amx32_blocks<PackedMXFP4>(a[i], rows, tiles, b, some); break;
        default: amx32_blocks<PackedQ4_0>(a[i], rows, tiles, b, some);
      }
  }
  tiles_end();
}

// Columns of a block of a type that has a tile kernel, otherwise 0.
int tile_block(QType type) {
  switch (type) {
    case QType::Q4_K:
    case QType::Q5_K:
    case QType::Q6_K:
    case QType::IQ4_XS: return 256;
    case QType::Q8_0:
    case QType::Q4_0:
    case QType::MXFP4: return 32;
    default: return 0;
  }
}

// See KernelTable.
void tiles_packed_tiles(const TileArgs* a, int count) {
  const int block = tile_block(a->type);
  if (a->num_tokens < kMinTileTokens || a->num_tokens > kTileBatch || block == 0) return packed_tiles(a, count);
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < a->num_tokens; ++t) store(a[i].acc + t * 16, zero());
  if (block == 256)
    amx256_tiles(a, count);
  else
    amx32_tiles(a, count);
}

// As multiply_registers of probe.inl, in tiles.
int64_t multiply_tiles(int64_t rounds, int32_t* out) {
  alignas(64) int32_t sums[kTileTokens * 16];
  tiles_begin(kTileTokens, 64);
  KT_TILE_ZERO(0);
  KT_TILE_ZERO(1);
  KT_TILE_ZERO(2);
  KT_TILE_ZERO(3);
  KT_TILE_ZERO(4);
  KT_TILE_ZERO(5);
  KT_TILE_ZERO(6);
  KT_TILE_ZERO(7);
  for (int64_t i = 0; i < rounds; ++i) {
    KT_TILE_DOT_SIGNED(0, 4, 6);
    KT_TILE_DOT_SIGNED(1, 4, 7);
    KT_TILE_DOT_SIGNED(2, 5, 6);
    KT_TILE_DOT_SIGNED(3, 5, 7);
  }
  KT_TILE_STORE(0, sums, 64);
  tiles_end();
  std::memcpy(out, sums, 128);
  return rounds * 4 * 32768;
}

}  // namespace
