// Products of bf16 in vector registers, for machines with AVX512-BF16 and without AMX. Included by a tier file after
// bf16.inl.
//
// An output's operations are the same for any number of tokens and on any split: for every two columns, ascending, one
// VDPBF16PS: two products of bf16 added to the output, the odd column's first, each sum rounded once (processors that
// round otherwise stay within one more rounding per column). So a product passes at most 2 k roundings in fp32.

namespace {

constexpr int kBf16Tokens = 6;  // times two tiles of weights: as many sums as hide the latency, and fit in registers

// A panel of NW tiles of weights.
template <int NW> struct WeightPanel {
  const uint16_t* w[NW];
  const uint8_t* following[NW];  // see Following
};

// C tokens from t on: adds one panel to acc. ASKS: weights lie in place (StepsBf16), and are asked for line by line, so
// that requests for memory and products take turns.
template <int NW, int C, bool ASKS>
inline void add_panel(const TileArgs* a, const WeightPanel<NW>& weights, int64_t panel, int t) {
  const int steps = panel_steps(a->k, panel);
  const int64_t rows = a->blocks->rows;
  const uint16_t* x = a->blocks->bf16 + (panel * kPanelSteps * rows + t) * kBf16Cols;
  vf sums[NW][C];
#pragma GCC unroll 2
  for (int w = 0; w < NW; ++w)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[w][c] = panel == 0 ? zero() : load(a[w].acc + 16 * (t + c));
  for (int s = 0; s < steps; ++s, x += rows * kBf16Cols) {
    const uint8_t* ahead[NW] = {};
    if constexpr (ASKS)
      for (int w = 0; w < NW; ++w)
        ahead[w] = step_ahead<StepsBf16>(a[w].packed, weights.following[w], a->k, panel * kPanelSteps + s);
#pragma GCC unroll 4
    for (int i = 0; i < 16; ++i) {
      wb line[NW];
#pragma GCC unroll 2
      for (int w = 0; w < NW; ++w) {
        if constexpr (ASKS) __builtin_prefetch(ahead[w] + 64 * i);
        line[w] = load_wb(reinterpret_cast<const uint8_t*>(weights.w[w] + (16 * s + i) * 32));
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
        for (int w = 0; w < NW; ++w) sums[w][c] = dot_bf16(sums[w][c], line[w], x + c * kBf16Cols + 2 * i);
    }
  }
#pragma GCC unroll 2
  for (int w = 0; w < NW; ++w)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(a[w].acc + 16 * (t + c), sums[w][c]);
}

// ASKS: of the first tokens.
template <int NW, int C, bool ASKS>
inline void add_panel_tokens(const TileArgs* a, const WeightPanel<NW>& weights, int64_t panel, int t) {
  if constexpr (ASKS)
    if (t == 0 && C <= a->num_tokens) {
      add_panel<NW, C, true>(a, weights, panel, t);
      t += C;
    }
  for (; t + C <= a->num_tokens; t += C) add_panel<NW, C, false>(a, weights, panel, t);
  if constexpr (C > 1) add_panel_tokens<NW, C - 1, ASKS>(a, weights, panel, t);
}

struct VectorProducts {
  template <class S, int NW> static void run(const TileArgs* all, int first, int runs, const Following& following) {
    const int64_t panels = (all->k / kBf16Cols + kPanelSteps - 1) / kPanelSteps;
    Panel room;
    for (int i = first; i < first + runs * NW; i += NW)
      for (int64_t p = 0; p < panels; ++p) {
        WeightPanel<NW> weights;
        for (int w = 0; w < NW; ++w) {
          weights.following[w] = following.of(i + w);
          weights.w[w] = panel_of<S>(all[i + w], weights.following[w], p, room.w[w][0]);
        }
        add_panel_tokens<NW, kBf16Tokens, S::is_direct>(all + i, weights, p, 0);
      }
  }

  // Panel p of a tile, in place or unpacked in `room`.
  template <class S>
  static const uint16_t* panel_of(const TileArgs& a, const uint8_t* following, int64_t p, uint16_t* room) {
    const int64_t first = p * kPanelSteps;
    if constexpr (S::is_direct) {
      return reinterpret_cast<const uint16_t*>(step_at<S>(a.packed, a.k, first));
    } else {
      for (int s = 0; s < panel_steps(a.k, p); ++s) {
        S::unpack(a.packed, a.k, first + s, room + s * 16 * kBf16Cols);
        prefetch_step<S>(a.packed, following, a.k, first + s);
      }
      return room;
    }
  }
};

// As multiply_registers of probe.inl.
int64_t multiply_bf16(int64_t rounds, int32_t* out) {
  constexpr int kChains = 12;
  alignas(64) uint8_t bytes[64] = {};
  const wb line = load_wb(bytes);
  const uint16_t x[2] = {0x3f80, 0};
  vf sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = from_bits(loadi(out + c));  // see multiply_registers
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = dot_bf16(sums[c], line, x);
  vf total = zero();
  for (const vf& sum : sums) total = add(total, sum);
  storei(out, bits(total));
  return rounds * kChains * 64;
}

// See KernelTable.
void bf16_tiles(const TileArgs* a, int count) { multiply_all<VectorProducts>(a, count); }

}  // namespace
