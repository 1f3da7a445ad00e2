// Blocks of 32 on tile registers, and which kernel a type has there. Included after amx.inl.

namespace {

// Scales that a block has: NVFP4's is taken as two, each with zeros in the columns of the other.
template <class P> constexpr int kParts = 1;
template <> constexpr int kParts<PackedNVFP4> = 2;
template <> constexpr int kParts<PackedNvfp4Group> = 2;
template <class P> constexpr bool kHasOffset32 = std::is_same_v<P, PackedQ4_1> || std::is_same_v<P, PackedQ5_1>;

// What a form knows of the blocks of one tile: where its lines are, and what sums are multiplied with.
template <class Form> struct PlainBlocks {
  using P = Form;
  static constexpr bool has_zeros = false;
  const uint8_t *tile, *lines;
  explicit PlainBlocks(const TileArgs& a) : tile(a.packed), lines(a.packed + P::head(a.k / 32)) {}
  vf scale(int64_t block, int part) const {
    if constexpr (kParts<P> == 2) return P::scale(tile, block, part);
    return P::scale(tile, block);
  }
  vf minimum(int64_t block) const { return P::minimum(tile, block); }
};

// The blocks of a piece, those of one tile: what tiles load, and what their sums are multiplied with.
template <class B> struct PieceBlocks {
  static constexpr int parts = kParts<typename B::P>;
  const uint8_t* lines[8 * parts];
  alignas(64) float d[8 * parts][16];
  alignas(64) float m[kHasOffset32<typename B::P> ? 8 : 1][16];
  alignas(64) int32_t zeros[B::has_zeros ? 8 : 1][16];  // negated
};

template <class B>
inline void prepare_block(const B& blocks, int64_t first, int b, uint8_t (*room)[512], PieceBlocks<B>& out) {
  using P = typename B::P;
  const uint8_t* p = blocks.lines + (first + b) * P::bytes;
  if constexpr (kParts<P> == 2) {
    P::tile_halves(p, room[2 * b], room[2 * b + 1]);
    for (int half = 0; half < 2; ++half) {
      out.lines[2 * b + half] = room[2 * b + half];
      store(out.d[2 * b + half], blocks.scale(first + b, half));
    }
  } else {
    out.lines[b] = P::tile_lines(p, room[b]);
    store(out.d[b], blocks.scale(first + b, 0));
  }
  if constexpr (kHasOffset32<P>) store(out.m[b], blocks.minimum(first + b));
  if constexpr (B::has_zeros) storei(out.zeros[b], blocks.minus_zero(first + b));
}

// A tile of tokens times block `step` of four, to the register of that number. What this held goes to `done`, if there
// is one.
#define KT_MULTIPLY_BLOCK(SUM, WEIGHT)                         \
  do {                                                         \
    if (done != nullptr) KT_TILE_STORE(SUM, done->v[SUM], 64); \
    if (lines == nullptr) break;                               \
    KT_TILE_ZERO(SUM);                                         \
    KT_TILE_LOAD(4, q, kTileCols);                             \
    KT_TILE_LOAD(WEIGHT, lines, 64);                           \
    if constexpr (SIGNED)                                      \
      KT_TILE_DOT_SIGNED(SUM, 4, WEIGHT);                      \
    else                                                       \
      KT_TILE_DOT_UNSIGNED(SUM, 4, WEIGHT);                    \
  } while (false)

template <bool SIGNED> inline void multiply_block(int step, const uint8_t* lines, const int8_t* q, TileSums* done) {
  if (step == 0)
    KT_MULTIPLY_BLOCK(0, 5);
  else if (step == 1)
    KT_MULTIPLY_BLOCK(1, 6);
  else if (step == 2)
    KT_MULTIPLY_BLOCK(2, 7);
  else
    KT_MULTIPLY_BLOCK(3, 5);
}
#undef KT_MULTIPLY_BLOCK

// Adds the first N of four blocks, or parts of two, from number j on to the accumulators.
template <class B, int N>
inline void add_blocks(const PieceBlocks<B>& blocks, const TokenPiece& rows, int j, TokenRange tokens,
                       const TileSums& sums, int at, float* acc) {
  using P = typename B::P;
  vf d[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) d[i] = load(blocks.d[j + i]);
  for (int t = tokens.first; t < tokens.end; ++t, ++at) {
    vf total = load(acc + 16 * t);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const int block = (j + i) / kParts<P>;
      vi isum = loadi(sums.v[i] + 16 * at);
      if constexpr (!P::is_tile_signed && P::tile_offset != 0)
        isum = addi(isum, set1i(-P::tile_offset * rows.sums[t][block]));
      if constexpr (B::has_zeros) isum = add_times(isum, loadi(blocks.zeros[block]), set1i(rows.sums[t][block]));
      const vf da = set1(rows.d[t][block]);
      total = add(total, mul(mul(d[i], da), to_float(isum)));
      if constexpr (kHasOffset32<P>)
        total = add(total, mul(mul(load(blocks.m[block]), da), set1(static_cast<float>(rows.sums[t][block]))));
    }
    store(acc + 16 * t, total);
  }
}

template <class B>
inline void add_some_blocks(int count, const PieceBlocks<B>& blocks, const TokenPiece& rows, int j, TokenRange tokens,
                            const TileSums& sums, int at, float* acc) {
  if (count >= 4) return add_blocks<B, 4>(blocks, rows, j, tokens, sums, at, acc);
  if (count == 3) return add_blocks<B, 3>(blocks, rows, j, tokens, sums, at, acc);
  if (count == 2) return add_blocks<B, 2>(blocks, rows, j, tokens, sums, at, acc);
  if (count == 1) add_blocks<B, 1>(blocks, rows, j, tokens, sums, at, acc);
}

constexpr int kBlocksLag = 3;

// Four blocks or parts of a piece times a tile of tokens: which, and how many are there from the first on.
struct BlockUnit {
  TokenPiece rows;
  int first, left, token;
  BlockUnit(const TileArgs& a, const TileUnit& unit, int token_tiles, int parts)
      : rows(*a.blocks, unit.piece),
        first(4 * (unit.part / token_tiles)),
        left(parts * (static_cast<int>(a.k / 32) - 8 * unit.piece) - first),
        token(unit.part % token_tiles) {}
};

// All columns of `count` tiles of one type: a slot is a piece of one, and has four blocks or parts times all tokens
// after the four before.
template <class B> void amx_block_tiles(const TileArgs* a, int count) {
  using P = typename B::P;
  constexpr int parts = kParts<P>, quads = 2 * parts;
  const TokenTiles tiles(a->num_tokens);
  const int blocks = static_cast<int>(a->k / 32), pieces = (blocks + 7) / 8;
  const TileWork work = {pieces, count, quads * tiles.count};
  const int64_t head = B(a[0]).lines - a[0].packed;
  const TilePieces memory = {a, count, pieces, head, 8 * P::bytes, head + blocks * P::bytes};
  alignas(64) uint8_t room[2][8 * parts][512];
  PieceBlocks<B> made[4];  // from one slot before that of the products to kBlocksLag units after
  NextLines next;
  BlockUnit multiplied(*a, {}, 1, parts), added = multiplied;
  const auto prepare = [&](const TileUnit& slot, int b) {
    if (8 * slot.piece + b < blocks)
      prepare_block(B(a[slot.group]), 8 * slot.piece, b, room[slot.slot & 1], made[slot.slot & 3]);
  };
  const auto multiply = [&](const TileUnit& unit, TileSums* done, int step) {
    if (step == 0) multiplied = BlockUnit(*a, unit, tiles.count, parts);
    if (unit.part == 0 && step == 0) {
      TileUnit ahead = unit;
      for (int s = 0; s < kSlotsAhead; ++s) ahead.next_slot(count);
      next = memory.lines(ahead.group, ahead.piece, 4 * work.parts);
    }
    const int j = multiplied.first + step;
    multiply_block<P::is_tile_signed>(step, step < multiplied.left ? made[unit.slot & 3].lines[j] : nullptr,
                                      multiplied.rows.q[multiplied.token * tiles.height] + 32 * (j / parts), done);
    next.fetch();
  };
  const auto add = [&](const TileUnit& unit, const TileSums& sums, int step) {
    if (step == 0) added = BlockUnit(*a, unit, tiles.count, parts);
    const TokenRange tokens(tiles, added.token, step, a->num_tokens);
    add_some_blocks(added.left, made[unit.slot & 3], added.rows, added.first, tokens, sums,
                    tokens.first - added.token * tiles.height, a[unit.group].acc);
  };
  tiles_begin(tiles.height, 32, kFirstWeightTile);
  pipeline<kBlocksLag>(work, prepare, multiply, add);
  tiles_end();
}

template <class P> void amx32_tiles(const TileArgs* a, int count) { amx_block_tiles<PlainBlocks<P>>(a, count); }

void amx_grouped_tiles(const TileArgs* a, int count);  // amx_groups.inl

// Tiles of one type.
void amx_packed_tiles(const TileArgs* a, int count) {
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < a->num_tokens; ++t) store(a[i].acc + t * 16, zero());
  if (is_grouped(a->type)) return amx_grouped_tiles(a, count);
  switch (a->type) {
    case QType::Q4_K: return amx256_tiles<PackedQ4K>(a, count);
    case QType::Q5_K: return amx256_tiles<PackedQ5K>(a, count);
    case QType::Q6_K: return amx256_tiles<PackedQ6K>(a, count);
    case QType::IQ4_XS: return amx256_tiles<PackedIQ4XS>(a, count);
    case QType::Q8_0: return amx32_tiles<PackedQ8_0>(a, count);
    case QType::Q4_0: return amx32_tiles<PackedQ4_0>(a, count);
    case QType::MXFP4: return amx32_tiles<PackedMXFP4>(a, count);
    case QType::Q4_1: return amx32_tiles<PackedQ4_1>(a, count);
    case QType::Q5_0: return amx32_tiles<PackedQ5_0>(a, count);
    case QType::Q5_1: return amx32_tiles<PackedQ5_1>(a, count);
    case QType::IQ4_NL: return amx32_tiles<PackedIQ4NL>(a, count);
    case QType::NVFP4: return amx32_tiles<PackedNVFP4>(a, count);
    case QType::Q1_0: return amx32_tiles<PackedQ1_0>(a, count);
    case QType::Q2_K: return amx256_tiles<PackedQ2K>(a, count);
    case QType::Q3_K: return amx256_tiles<PackedQ3K>(a, count);
    case QType::TQ1_0: return amx256_tiles<PackedTQ1>(a, count);
    case QType::TQ2_0: return amx256_tiles<PackedTQ2>(a, count);
    default: return with_grid(a->type, [&](auto form) { amx256_tiles<decltype(form)>(a, count); });
  }
}

// See KernelTable.
void tiles_packed_tiles(const TileArgs* a, int count) {
  if (a->blocks == nullptr || a->blocks->rows == 0) return packed_tiles(a, count);
  for (int i = 0; i < count;) {
    int same = 1;
    while (i + same < count && a[i + same].type == a[i].type) ++same;
    amx_packed_tiles(a + i, same);
    i += same;
  }
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
