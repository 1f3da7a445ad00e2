// Integers in groups (packed/groups.inl) times many activation rows in tile registers. Included by a tier file after
// amx/blocks32.inl, as whose blocks of 32 they go; FP8 has no product of tiles of its own.

namespace {

// Adds blocks j and, if has_second, j + 1 of the piece. zeros: negated.
template <class P>
inline void add_group_blocks(const vf* d, const vi* zeros, bool has_second, const TokenPiece& rows, int j,
                             TokenRange tokens, const TileSums& sums, int at, float* acc) {
  const int32_t* sum[2] = {sums.v[0] + 16 * at, sums.v[1] + 16 * at};
  for (int t = tokens.first; t < tokens.end; ++t, sum[0] += 16, sum[1] += 16) {
    vf total = load(acc + 16 * t);
    for (int i = 0; i < (has_second ? 2 : 1); ++i) {
      const int row_sum = rows.sums[t][j + i];
      vi isum = addi(loadi(sum[i]), set1i(-P::tile_offset * row_sum));
      isum = add_times(isum, zeros[i], set1i(row_sum));
      total = add(total, mul(mul(d[i], set1(rows.d[t][j + i])), to_float(isum)));
    }
    store(acc + 16 * t, total);
  }
}

// As amx32_blocks.
template <class P>
void amx_group_blocks(const TileArgs& a, const TokenPiece& rows, const TokenTiles& tiles, int64_t first, int count) {
  alignas(64) uint8_t steps[8][512];
  const uint8_t* lines[8];
  const GroupHead head(a);
  const bool has_zero = GroupForm(a.type).has_zero;
  const uint8_t* p = head.lines + first * P::bytes;
  for (int b = 0; b < count; ++b) lines[b] = P::tile_lines(p + b * P::bytes, steps[b]);
  NextLines next(p + count * P::bytes, 8 * P::bytes, (count + 1) / 2 * tiles.count * 4);
  const auto multiply = [&](TileItem item, int set, int step) {
    const int j = 2 * item.weight, second = j + 1 < count ? j + 1 : j;
    const int8_t* q = rows.q[item.token * tiles.height];
    if (step == 0) multiply_blocks<P::is_tile_signed>(set, lines[j], lines[second], q + 32 * j, q + 32 * second);
    next.fetch();
  };
  const auto add = [&](TileItem item, const TileSums& sums, int step) {
    const int j = 2 * item.weight;
    const bool has_second = j + 1 < count;
    vf d[2] = {head.scale(first + j), zero()};
    vi zeros[2] = {set1i(0), set1i(0)};
    if (has_second) d[1] = head.scale(first + j + 1);
    if (has_zero) zeros[0] = head.minus_zero(first + j);
    if (has_zero && has_second) zeros[1] = head.minus_zero(first + j + 1);
    const TokenRange tokens(tiles, item.token, step, a.num_tokens);
    add_group_blocks<P>(d, zeros, has_second, rows, j, tokens, sums, tokens.first - item.token * tiles.height, a.acc);
  };
  pipeline((count + 1) / 2, tiles.count, multiply, add);
}

template <class P> void amx_group_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  tiles_begin(tiles.height, 32);
  const int64_t blocks = a->k / 32;
  for (int64_t b = 0; b < blocks; b += 8) {
    const int some = static_cast<int>(blocks - b < 8 ? blocks - b : 8);
    const TokenPiece rows(*a->blocks, b / 8);
    for (int i = 0; i < count; ++i) amx_group_blocks<P>(a[i], rows, tiles, b, some);
  }
  tiles_end();
}

// Tiles of one grouped type; adds to their acc.
void amx_grouped_tiles(const TileArgs* a, int count) {
  switch (GroupForm(a->type).codes) {
    case CodeKind::I4: return amx_group_tiles<PackedQ4_0>(a, count);
    case CodeKind::I8: return amx_group_tiles<PackedQ8_0>(a, count);
    case CodeKind::E2M1: return amx32_tiles<PackedNvfp4Group>(a, count);
    default:
      for (int i = 0; i < count; ++i) parts::grouped_tile(a[i]);
  }
}

}  // namespace
