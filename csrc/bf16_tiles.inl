// Products of bf16 in tile registers. Included by a tier file after bf16.inl, amx.inl.
//
// An output's operations are the same for any number of tokens and on any split: for every 32 columns, ascending, one
// TDPBF16PS. Its definition (Intel's manual) makes that two chains of 16 fused multiplications from zero, over the even and
// over the odd columns; their sum is added to the output. So a product passes at most 16 + 1 + k / 32 roundings in fp32.

namespace {

// Up to two tiles of weights times up to two tiles of tokens, 32 columns: registers 2 t + w.
template <int NW, int NT> inline void dot_step(const uint16_t* w0, const uint16_t* w1, const uint16_t* x0, const uint16_t* x1) {
  tiles_see_memory();
  KT_TILE_LOAD(4, x0, 64);
  KT_TILE_LOAD(6, w0, 64);
  KT_TILE_DOT_BF16(0, 4, 6);
  if constexpr (NW == 2) {
    KT_TILE_LOAD(7, w1, 64);
    KT_TILE_DOT_BF16(1, 4, 7);
  }
  if constexpr (NT == 2) {
    KT_TILE_LOAD(5, x1, 64);
    KT_TILE_DOT_BF16(2, 5, 6);
    if constexpr (NW == 2) KT_TILE_DOT_BF16(3, 5, 7);
  }
}

template <int NW, int NT> inline void zero_outputs() {
  KT_TILE_ZERO(0);
  if constexpr (NW == 2) KT_TILE_ZERO(1);
  if constexpr (NT == 2) KT_TILE_ZERO(2);
  if constexpr (NT == 2 && NW == 2) KT_TILE_ZERO(3);
}

// row: the first token of the first tile, height: rows from one tile to the next.
template <int NW, int NT> inline void load_outputs(const TileArgs* a, int row, int height) {
  tiles_see_memory();
  KT_TILE_LOAD(0, a[0].acc + 16 * row, 64);
  if constexpr (NW == 2) KT_TILE_LOAD(1, a[1].acc + 16 * row, 64);
  if constexpr (NT == 2) KT_TILE_LOAD(2, a[0].acc + 16 * (row + height), 64);
  if constexpr (NT == 2 && NW == 2) KT_TILE_LOAD(3, a[1].acc + 16 * (row + height), 64);
}

template <int NW, int NT> inline void store_outputs(const TileArgs* a, int row, int height) {
  KT_TILE_STORE(0, a[0].acc + 16 * row, 64);
  if constexpr (NW == 2) KT_TILE_STORE(1, a[1].acc + 16 * row, 64);
  if constexpr (NT == 2) KT_TILE_STORE(2, a[0].acc + 16 * (row + height), 64);
  if constexpr (NT == 2 && NW == 2) KT_TILE_STORE(3, a[1].acc + 16 * (row + height), 64);
  tiles_see_memory();
}

// Makes the next panel bit by bit, between the products of the present one: the processor does both at a time, but looks
// ahead a few hundred operations only.
template <class S, int NW> struct Unpacking {
  const TileArgs* a;
  const uint8_t* const* following;
  int64_t first;  // step
  int count, done = 0;
  Panel* out;

  void advance(int to) {
    for (; done < to; ++done) {
      const int w = done % NW, s = done / NW;
      S::unpack(a[w].packed, a[w].k, first + s, out->w[w][s]);
      prefetch_step<S>(a[w].packed, following[w], a[w].k, first + s);
    }
  }
  void finish() { advance(NW * count); }
};

// One panel times up to two tiles of tokens, from number `tile` on; `turns` pairs of tiles share the next panel's work.
template <class S, int NW, int NT>
inline void multiply_panel(const TileArgs* a, const TokenTiles& tiles, int tile, int64_t panel, const Panel& weights,
                           Unpacking<S, NW>& next, const uint8_t* const* following) {
  const int steps = panel_steps(a->k, panel), height = tiles.height, row = tile * height;
  const int turn = tile / 2, turns = (tiles.count + 1) / 2;
  const int64_t rows = a->blocks->rows;
  const uint16_t* x = a->blocks->bf16 + (panel * kPanelSteps * rows + row) * kBf16Cols;
  if (panel == 0)
    zero_outputs<NW, NT>();
  else if (turns > 1)
    load_outputs<NW, NT>(a, row, height);
  for (int s = 0; s < steps; ++s, x += rows * kBf16Cols) {
    const uint16_t *w0 = weights.w[0][s], *w1 = weights.w[NW - 1][s];
    if constexpr (S::is_direct) {
      const int64_t step = panel * kPanelSteps + s;
      w0 = reinterpret_cast<const uint16_t*>(step_at<S>(a[0].packed, a->k, step));
      w1 = reinterpret_cast<const uint16_t*>(step_at<S>(a[NW - 1].packed, a->k, step));
      if (turn == 0)
        for (int w = 0; w < NW; ++w) prefetch_step<S>(a[w].packed, following[w], a->k, step);
    }
    dot_step<NW, NT>(w0, w1, x, x + height * kBf16Cols);
    if constexpr (!S::is_direct) next.advance(NW * next.count * (turn * steps + s + 1) / (turns * steps));
  }
  if (turns > 1 || (panel + 1) * kPanelSteps * kBf16Cols >= a->k) store_outputs<NW, NT>(a, row, height);
}

template <class S, int NW> void multiply_pair(const TileArgs* a, const uint8_t* const* following) {
  const TokenTiles tiles(a->num_tokens);
  const int64_t panels = (a->k / kBf16Cols + kPanelSteps - 1) / kPanelSteps;
  Panel weights[S::is_direct ? 1 : 2];
  if constexpr (!S::is_direct) Unpacking<S, NW>{a, following, 0, panel_steps(a->k, 0), 0, &weights[0]}.finish();
  tiles_begin(tiles.height, 64);
  for (int64_t p = 0; p < panels; ++p) {
    Unpacking<S, NW> next = {a, following, (p + 1) * kPanelSteps, p + 1 < panels ? panel_steps(a->k, p + 1) : 0, 0, nullptr};
    if constexpr (!S::is_direct) next.out = &weights[(p + 1) & 1];
    const Panel& present = weights[S::is_direct ? 0 : p & 1];
    for (int t = 0; t < tiles.count; t += 2) {
      if (t + 1 < tiles.count)
        multiply_panel<S, NW, 2>(a, tiles, t, p, present, next, following);
      else
        multiply_panel<S, NW, 1>(a, tiles, t, p, present, next, following);
    }
    if constexpr (!S::is_direct) next.finish();
  }
  tiles_end();
}

struct TileProducts {
  template <class S, int NW> static void pair(const TileArgs* a, const uint8_t* const* following) { multiply_pair<S, NW>(a, following); }
};

// As multiply_tiles of amx.inl.
int64_t multiply_bf16(int64_t rounds, int32_t* out) {
  alignas(64) float sums[kTileTokens * 16];
  tiles_begin(kTileTokens, 64);
  zero_outputs<2, 2>();
  KT_TILE_ZERO(4);
  KT_TILE_ZERO(5);
  KT_TILE_ZERO(6);
  KT_TILE_ZERO(7);
  for (int64_t i = 0; i < rounds; ++i) {
    KT_TILE_DOT_BF16(0, 4, 6);
    KT_TILE_DOT_BF16(1, 4, 7);
    KT_TILE_DOT_BF16(2, 5, 6);
    KT_TILE_DOT_BF16(3, 5, 7);
  }
  KT_TILE_STORE(0, sums, 64);
  tiles_end();
  std::memcpy(out, sums, 128);
  return rounds * 4 * 16384;
}

// See KernelTable.
void bf16_tiles(const TileArgs* a, int count) { multiply_pairs<TileProducts>(a, count); }

}  // namespace
