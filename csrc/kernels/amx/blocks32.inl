// Blocks of 32 on tile registers, and which kernel a type has there. Included after amx.inl.

namespace {

// Scales that a block has: NVFP4's is taken as two, each with zeros in the columns of the other.
template <class P> constexpr int kParts = 1;
template <> constexpr int kParts<PackedNVFP4> = 2;
template <> constexpr int kParts<PackedNvfp4Group> = 2;
template <class P> constexpr bool kHasOffset32 = std::is_same_v<P, PackedQ4_1> || std::is_same_v<P, PackedQ5_1>;

template <class P> inline vf part_scale(const uint8_t* tile, int64_t block, int part) {
  if constexpr (kParts<P> == 2) return P::scale(tile, block, part);
  return P::scale(tile, block);
}

// One tile of tokens times two neighbouring blocks, or parts of one.
template <bool SIGNED>
inline void multiply_blocks(int set, const uint8_t* w0, const uint8_t* w1, const int8_t* q0, const int8_t* q1) {
  tiles_see_memory();
  KT_TILE_LOAD(6, w0, 64);
  KT_TILE_LOAD(7, w1, 64);
  KT_TILE_LOAD(4, q0, kTileCols);
  KT_TILE_LOAD(5, q1, kTileCols);
  if (set == 0) {
    KT_TILE_ZERO(0);
    KT_TILE_ZERO(1);
  } else {
    KT_TILE_ZERO(2);
    KT_TILE_ZERO(3);
  }
  if (SIGNED && set == 0) {
    KT_TILE_DOT_SIGNED(0, 4, 6);
    KT_TILE_DOT_SIGNED(1, 5, 7);
  } else if (SIGNED) {
    KT_TILE_DOT_SIGNED(2, 4, 6);
    KT_TILE_DOT_SIGNED(3, 5, 7);
  } else if (set == 0) {
    KT_TILE_DOT_UNSIGNED(0, 4, 6);
    KT_TILE_DOT_UNSIGNED(1, 5, 7);
  } else {
    KT_TILE_DOT_UNSIGNED(2, 4, 6);
    KT_TILE_DOT_UNSIGNED(3, 5, 7);
  }
}

// What two neighbouring blocks, or parts of one, multiply their sums with.
struct BlockScales {
  vf d[2], m[2];
  bool has_second;
};

// Adds blocks j and, if there is a second, j + 1 of the piece (or the parts of block j) to the accumulators.
template <class P>
inline void add_blocks(const BlockScales& scales, const TokenPiece& rows, int j, TokenRange tokens,
                       const TileSums& sums, int at, float* acc) {
  for (int t = tokens.first; t < tokens.end; ++t, ++at) {
    vf total = load(acc + 16 * t);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !scales.has_second) break;
      const int block = kParts<P> == 2 ? j : j + i;
      vi isum = loadi(sums.v[i] + 16 * at);
      if constexpr (!P::is_tile_signed && P::tile_offset != 0)
        isum = addi(isum, set1i(-P::tile_offset * rows.sums[t][block]));
      const vf da = set1(rows.d[t][block]);
      total = add(total, mul(mul(scales.d[i], da), to_float(isum)));
      if constexpr (kHasOffset32<P>)
        total = add(total, mul(mul(scales.m[i], da), set1(static_cast<float>(rows.sums[t][block]))));
    }
    store(acc + 16 * t, total);
  }
}

// Blocks first .. first + count - 1, at most 8, those of `rows`: tiles of tokens within pairs of blocks or of parts.
template <class P>
void amx32_blocks(const TileArgs& a, const TokenPiece& rows, const TokenTiles& tiles, int64_t first, int count) {
  constexpr int parts = kParts<P>;
  alignas(64) uint8_t steps[8 * parts][512];
  const uint8_t* lines[8 * parts];
  const uint8_t* p = a.packed + P::head(a.k / 32) + first * P::bytes;
  const int units = parts * count;
  for (int b = 0; b < count; ++b) {
    if constexpr (parts == 2) {
      P::tile_halves(p + b * P::bytes, steps[2 * b], steps[2 * b + 1]);
      lines[2 * b] = steps[2 * b];
      lines[2 * b + 1] = steps[2 * b + 1];
    } else {
      lines[b] = P::tile_lines(p + b * P::bytes, steps[b]);
    }
  }
  NextLines next(p + count * P::bytes, 8 * P::bytes, (units + 1) / 2 * tiles.count * 4);
  const auto multiply = [&](TileItem item, int set, int step) {
    const int j = 2 * item.weight, second = j + 1 < units ? j + 1 : j;
    const int8_t* q = rows.q[item.token * tiles.height];
    if (step == 0)
      multiply_blocks<P::is_tile_signed>(set, lines[j], lines[second], q + 32 * (j / parts), q + 32 * (second / parts));
    next.fetch();
  };
  const auto add = [&](TileItem item, const TileSums& sums, int step) {
    const int j = 2 * item.weight;
    BlockScales scales = {{zero(), zero()}, {zero(), zero()}, j + 1 < units};
    for (int i = 0; i <= static_cast<int>(scales.has_second); ++i) {
      scales.d[i] = part_scale<P>(a.packed, first + (j + i) / parts, (j + i) % parts);
      if constexpr (kHasOffset32<P>) scales.m[i] = P::minimum(a.packed, first + j + i);
    }
    const TokenRange tokens(tiles, item.token, step, a.num_tokens);
    add_blocks<P>(scales, rows, j / parts, tokens, sums, tokens.first - item.token * tiles.height, a.acc);
  };
  pipeline((units + 1) / 2, tiles.count, multiply, add);
}

template <class P> void amx32_tiles(const TileArgs* a, int count) {
  const TokenTiles tiles(a->num_tokens);
  tiles_begin(tiles.height, 32);
  const int64_t blocks = a->k / 32;
  for (int64_t b = 0; b < blocks; b += 8) {
    const int some = static_cast<int>(blocks - b < 8 ? blocks - b : 8);
    const TokenPiece rows(*a->blocks, b / 8);
    for (int i = 0; i < count; ++i) amx32_blocks<P>(a[i], rows, tiles, b, some);
  }
  tiles_end();
}

void amx_grouped_tiles(const TileArgs* a, int count);  // amx/groups.inl

// Tiles of one type.
void amx_packed_tiles(const TileArgs* a, int count) {
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < a->num_tokens; ++t) store(a[i].acc + t * 16, zero());
  if (is_grouped(a->type)) return amx_grouped_tiles(a, count);
  with_format(a->type, [&](auto format) {
    constexpr const FormatInfo& info = decltype(format)::info;
    if constexpr (info.kernels != Kernels::Plain && info.kernels != Kernels::Fp8) {
      using P = typename Kernel<info.type>::Packed;
      if constexpr (info.form == ActForm::Q32)
        amx32_tiles<P>(a, count);
      else
        amx256_tiles<P>(a, count);
    }
  });
}

// See KernelTable.
void tiles_packed_tiles(const TileArgs* a, int count) {
  if (a->blocks == nullptr || a->blocks->rows == 0) return parts::packed_tiles(a, count, kHasVbmi);
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
