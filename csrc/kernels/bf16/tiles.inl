// Products of bf16 in tile registers. Included by a tier file after bf16.inl, amx.inl.
//
// An output's operations are the same for any number of tokens and on any split: for every 32 columns, ascending, one
// TDPBF16PS. Its definition (Intel's manual) makes that two chains of 16 fused multiplications from zero, over the even
// and over the odd columns; their sum is added to the output. So a product passes at most 16 + 1 + k / 32 roundings in
// fp32.

namespace {

// Up to two tiles of weights times up to two tiles of tokens, 32 columns: registers 2 t + w.
template <int NW, int NT>
inline void dot_step(const uint16_t* w0, const uint16_t* w1, const uint16_t* x0, const uint16_t* x1) {
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

// Makes the next panel bit by bit, between the products of the present one: the processor does both at a time, but
// looks ahead a few hundred operations only.
template <class S, int NW> struct Unpacking {
  const TileArgs* a;
  const uint8_t* following[NW];
  int64_t first;  // step
  int count, done;
  Panel* out;

  // Of panel number `panel` of tiles i .. i + NW - 1.
  Unpacking(const TileArgs* tiles, int i, int64_t panel, const Following& all, Panel* to)
      : a(tiles + i), first(panel * kPanelSteps), count(panel_steps(tiles->k, panel)), done(0), out(to) {
    for (int w = 0; w < NW; ++w) following[w] = all.of(i + w);
  }
  void advance(int to) {
    for (; done < to; ++done) {
      const int w = done % NW, s = done / NW;
      if constexpr (!S::is_direct) S::unpack(a[w].packed, a[w].k, first + s, out->w[w][s]);
      prefetch_step<S>(a[w].packed, following[w], a[w].k, first + s);
    }
  }
  void finish() { advance(NW * count); }
};

// One panel times up to two tiles of tokens, from number `tile` on; pairs of tiles share the next panel's work.
template <class S, int NW, int NT>
inline void multiply_panel(const TileArgs* a, const TokenTiles& tiles, int tile, int64_t panel, const Panel& weights,
                           Unpacking<S, NW>* next) {
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
    }
    dot_step<NW, NT>(w0, w1, x, x + height * kBf16Cols);
    if (next != nullptr) next->advance(NW * next->count * (turn * steps + s + 1) / (turns * steps));
  }
  if (turns > 1 || (panel + 1) * kPanelSteps * kBf16Cols >= a->k) store_outputs<NW, NT>(a, row, height);
}

// `runs` times NW tiles of one type from number `first` on, panel after panel. For weights that need no unpacking the
// next panel is only asked for.
template <class S, int NW> void multiply_run(const TileArgs* all, int first, int runs, const Following& following) {
  const TokenTiles tiles(all->num_tokens);
  const int panels = static_cast<int>((all->k / kBf16Cols + kPanelSteps - 1) / kPanelSteps);
  Panel weights[S::is_direct ? 1 : 2];
  const auto unpacking = [&](int n) {
    return Unpacking<S, NW>(all, first + n / panels * NW, n % panels, following, &weights[S::is_direct ? 0 : n & 1]);
  };
  unpacking(0).finish();
  tiles_begin(tiles.height, 64);
  for (int n = 0; n < runs * panels; ++n) {
    const TileArgs* a = all + first + n / panels * NW;
    const bool has_next = n + 1 < runs * panels;
    Unpacking<S, NW> next = unpacking(has_next ? n + 1 : n);
    const Panel& present = weights[S::is_direct ? 0 : n & 1];
    for (int t = 0; t < tiles.count; t += 2) {
      if (t + 1 < tiles.count)
        multiply_panel<S, NW, 2>(a, tiles, t, n % panels, present, has_next ? &next : nullptr);
      else
        multiply_panel<S, NW, 1>(a, tiles, t, n % panels, present, has_next ? &next : nullptr);
    }
  }
  tiles_end();
}

struct TileProducts {
  template <class S, int NW> static void run(const TileArgs* a, int first, int runs, const Following& following) {
    multiply_run<S, NW>(a, first, runs, following);
  }
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
void bf16_tiles(const TileArgs* a, int count) { multiply_all<TileProducts>(a, count); }

}  // namespace
