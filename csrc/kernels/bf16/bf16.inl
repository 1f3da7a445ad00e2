// Weights as bf16, 16 rows and 32 columns at a time: how each packed type is unpacked into them, and how activations
// are rounded. Included by a tier file after fp8.inl and simd/bf16_*.h, before bf16/tiles.inl or bf16/vector.inl, which
// multiply. An opt-in for quantized types (TokenBlocks::bf16); BF16 weights have no other form when packed.
//
// A step is 32 columns of 16 rows: 16 lines of 64 bytes, line i being columns 2 i and 2 i + 1 of row r in its words 2 r
// and 2 r + 1. BF16 weights are packed as k / 32 of them, k a multiple of 32.
//
// Unpacked weights are w (1 + 1 / 384) in fp32, cut to bf16: cheaper than rounding and nearly as good. What is added is
// 1/3 to 2/3 of the last place, so that numbers of bf16 stay what they are and errors have no sign on average.
//
// Errors (the exact w, x, and the largest scale times value or minimum M of a row):
//   activations |xb - x| <= 2^-8 |x|; BF16 weights none
//   unpacked weights |wb - w| <= 2/3 2^-7 |w| + 2^-14 M, of which the last covers what is done in fp32
//   sums: see bf16/tiles.inl and bf16/vector.inl. Subnormal factors, products and sums count as zeros.

namespace {

// w = value * scale + offset in every row
struct Affine { vf scale, offset; };

constexpr float kBeforeCut = 1.0f + 1.0f / 384.0f;
inline vf apply(const Affine& f, vf value) { return fma_(value, f.scale, f.offset); }

// For values that are read as 1 + (value + shift) / 256. The scale keeps 16 bits, so that its products with the numbers
// below are exact: value 0 becomes 0.
inline Affine of_bytes(vf scale, vf offset, float shift) {
  scale = from_bits(andi(bits(scale), set1i(-256)));
  return {mul(scale, set1(256.0f)), sub(offset, mul(scale, set1(256.0f + shift)))};
}

// Four columns from bits N, N + 8, N + 16 and N + 24 of every row's word, or from its four bytes.
template <int N> inline void store_nibbles(wb line, vf table, const Affine& f, uint16_t* out) {
  store_pairs(out, apply(f, lookup_nibble<N>(table, line)), apply(f, lookup_nibble<N + 8>(table, line)));
  store_pairs(out + 32, apply(f, lookup_nibble<N + 16>(table, line)), apply(f, lookup_nibble<N + 24>(table, line)));
}
inline void store_bytes(wb values, const Affine& f, uint16_t* out) {
  store_pairs(out, apply(f, byte_fraction<0>(values)), apply(f, byte_fraction<1>(values)));
  store_pairs(out + 32, apply(f, byte_fraction<2>(values)), apply(f, byte_fraction<3>(values)));
}

struct FloatTable {
  alignas(64) float v[16];
  constexpr explicit FloatTable(const int8_t* values) : v() {
    for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(values[i]);
  }
};
constexpr int8_t kNibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <const int8_t* VALUES> constexpr FloatTable kFloats(VALUES);

// ---- sources of steps: where a step's bytes are, and what it is as bf16 ----

template <class P> struct Steps256 {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = P::bytes / 8;
  static constexpr bool is_nibbles = std::is_same_v<P, PackedQ4K> || std::is_same_v<P, PackedIQ4XS>;
  static int64_t head(int64_t k) { return super_head<P>(k / 256); }

  template <int HALF, int I> static void lines(const uint8_t* p, int g, const Affine* f, vf table, uint16_t* out) {
    if constexpr (I < 8) {
      const Affine& affine = f[P::F::subs == 16 ? I / 4 : 0];
      const wb line = group_line<P>(p, g, I);
      if constexpr (is_nibbles)
        store_nibbles<4 * HALF>(line, table, affine, out + 64 * I);
      else
        store_bytes(HALF == 0 ? P::template low<I>(p, g, line) : P::template high<I>(p, g, line), affine, out + 64 * I);
      lines<HALF, I + 1>(p, g, f, table, out);
    }
  }

  // Of sub-block j of the 256 columns.
  static Affine affine(const uint8_t* packed, const uint8_t* p, int64_t b, int j) {
    const vi pair = load_scales<P>(p, j / 2);
    const vf d = super_d<P>(packed, p, b);
    const vf scale = mul(mul(d, set1(kBeforeCut)), to_float(j % 2 == 0 ? lane_scale_low(pair) : lane_scale_high(pair)));
    vf offset = zero();
    if constexpr (P::F::has_min) {
      const vi minima = load_minima<P>(p, j / 2);
      const vf dmin = mul(load_f16(p + 32), set1(-kBeforeCut));
      offset = mul(dmin, to_float(j % 2 == 0 ? lane_scale_low(minima) : lane_scale_high(minima)));
    }
    if constexpr (is_nibbles)
      return {scale, offset};
    else if constexpr (P::F::has_min)
      return of_bytes(scale, offset, 0.0f);
    else
      return of_bytes(scale, offset, static_cast<float>(P::offset));
  }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const int64_t b = step / 8;
    const int s = static_cast<int>(step % 8);
    const uint8_t* p = packed + head(k) + b * P::bytes;
    Affine f[2];
    if constexpr (P::F::subs == 16) {
      f[0] = affine(packed, p, b, 2 * s);
      f[1] = affine(packed, p, b, 2 * s + 1);
    } else {
      f[0] = affine(packed, p, b, s);
    }
    const vf table = load(std::is_same_v<P, PackedIQ4XS> ? kFloats<kIq4Values>.v : kFloats<kNibbles>.v);
    if (s % 2 == 0)
      lines<0, 0>(p, s / 2, f, table, out);
    else
      lines<1, 0>(p, s / 2, f, table, out);
  }
};

template <class P> struct Steps32 {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = P::bytes;
  static int64_t head(int64_t k) { return P::head(k / 32); }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const uint8_t* p = packed + head(k) + step * P::bytes;
    const vf scale = mul(P::scale(packed, step), set1(kBeforeCut));
    if constexpr (std::is_same_v<P, PackedQ8_0>) {
      const Affine f = of_bytes(scale, zero(), 128.0f);
      for (int i = 0; i < 8; ++i) store_bytes(flip_signs(load_wb(p + 64 * i)), f, out + 64 * i);
    } else {
      const Affine f = {scale, zero()};
      const vf table = load(kFloats<P::table>.v);
      for (int i = 0; i < 4; ++i) {
        const wb line = load_wb(p + 64 * i);
        store_nibbles<0>(line, table, f, out + 64 * i);
        store_nibbles<4>(line, table, f, out + 256 + 64 * i);
      }
    }
  }
};

// Q4_1 .. NVFP4, see packed/small.inl: two scales of 16 columns, or one and an offset.
template <class P> struct StepsSmall {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = P::bytes;
  static int64_t head(int64_t k) { return P::head(k / 32); }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const uint8_t* p = packed + head(k) + step * P::bytes;
    const vf scale = mul(P::scale(packed, step), set1(kBeforeCut));
    const vf second = mul(P::minimum(packed, step), set1(kBeforeCut));
    if constexpr (P::has_fifth || std::is_same_v<P, PackedQ1_0>) {
      wb steps[8];
      P::unpack(p, steps);
      const Affine f = of_bytes(scale, second, static_cast<float>(P::tile_offset));
      for (int i = 0; i < 8; ++i) store_bytes(steps[i], f, out + 64 * i);
    } else {
      const Affine low = {scale, P::has_min ? second : zero()}, high = P::is_halved ? Affine{second, zero()} : low;
      const vf table = load(P::is_halved ? kFloats<kMxfp4Values>.v : kFloats<kNibbles>.v);
      for (int i = 0; i < 4; ++i) {
        const wb line = load_wb(p + 64 * i);
        store_nibbles<0>(line, table, low, out + 64 * i);
        store_nibbles<4>(line, table, high, out + 256 + 64 * i);
      }
    }
  }
};

template <class P> struct StepsTernary {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = P::bytes / 8;
  static int64_t head(int64_t k) { return head_bytes(k / 256); }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const uint8_t* p = packed + head(k) + step / 8 * P::bytes;
    const Affine f = of_bytes(mul(block_d(packed, step / 8), set1(kBeforeCut)), zero(), 1.0f);
    for (int i = 0; i < 8; ++i) store_bytes(P::one(p, static_cast<int>(step % 8) * 8 + i), f, out + 64 * i);
  }
};

// A step is a part of a block of a type with a grid.
template <class P> struct StepsGrid {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = P::bytes / 8;
  static int64_t head(int64_t k) { return super_head<P>(k / 256); }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const uint8_t* p = packed + head(k) + step / 8 * P::bytes;
    alignas(64) uint8_t w[512];
    alignas(64) int32_t scales[2 * 16];
    stage_part<P>(p, static_cast<int>(step % 8), w, scales);
    const vf d = mul(grid_d<P>(packed, step / 8), set1(kBeforeCut));
    for (int i = 0; i < 8; ++i) {
      const int32_t* scale = scales + (P::spec.subs == 16 ? i / 4 * 16 : 0);
      store_bytes(load_wb(w + 64 * i), of_bytes(mul(d, to_float(loadi(scale))), zero(), 128.0f), out + 64 * i);
    }
  }
};

struct StepsFp8 {
  static constexpr bool is_direct = false;
  static constexpr int64_t step_bytes = 16 * kBf16Cols;
  static int64_t head(int64_t k) { return fp8_head_bytes(k); }

  static void unpack(const uint8_t* packed, int64_t k, int64_t step, uint16_t* out) {
    const uint8_t* p = packed + head(k) + step * step_bytes;
    const vf scale = mul(fp8_scale(packed, step * kBf16Cols / kFp8Cols), set1(kBeforeCut));
    for (int i = 0; i < 16; ++i) {
      vf even, odd;
      fp8_pair(p + 32 * i, &even, &odd);
      store_pairs(out + 32 * i, mul(even, scale), mul(odd, scale));
    }
  }
};

struct StepsBf16 {
  static constexpr bool is_direct = true;
  static constexpr int64_t step_bytes = 32 * kBf16Cols;
  static int64_t head(int64_t) { return 0; }
};

template <class S> inline const uint8_t* step_at(const uint8_t* packed, int64_t k, int64_t step) {
  return packed + S::head(k) + step * S::step_bytes;
}

// Asks for the bytes of a step that lies ahead of one that is unpacked (or, of BF16, will be multiplied a panel later),
// in `following` where the tile has ended.
template <class S> constexpr int64_t kAheadSteps = S::is_direct ? 8 : 12;
template <class S>
inline const uint8_t* step_ahead(const uint8_t* packed, const uint8_t* following, int64_t k, int64_t step) {
  const int64_t ahead = step + kAheadSteps<S>, steps = k / kBf16Cols;
  return ahead < steps ? step_at<S>(packed, k, ahead) : step_at<S>(following, k, ahead - steps);
}
template <class S> inline void prefetch_step(const uint8_t* packed, const uint8_t* following, int64_t k, int64_t step) {
  const uint8_t* p = step_ahead<S>(packed, following, k, step);
  for (int64_t i = 0; i < S::step_bytes; i += 64) __builtin_prefetch(p + i);
}

// Where tiles of a task continue: in the next pair of the task, or in as many tiles on as stand side by side.
struct Following {
  const TileArgs* a;
  int count;
  int64_t tile_bytes;

  const uint8_t* of(int i) const {
    if (i + 2 < count && a[i + 2].type == a[i].type) return a[i + 2].packed;
    int run = 1;
    while (run < count && a[run].packed == a[0].packed + run * tile_bytes) ++run;
    return a[i % 2].packed + run * tile_bytes;
  }
};

template <> struct Kernel<QType::BF16> { using Steps = StepsBf16; };
template <> struct Kernel<QType::F8_E4M3> { using Steps = StepsFp8; };

// Calls task(S{}) for the source of steps that `type` has.
template <class Task> inline void with_steps(QType type, const Task& task) {
  with_format(type, [&](auto format) {
    if constexpr (decltype(format)::info.packed_bytes != 0) task(typename Kernel<decltype(format)::type>::Steps{});
  });
}

constexpr int kPanelSteps = 8;  // 256 columns are unpacked at a time

// Two tiles of weights, 256 columns of each.
struct Panel { alignas(64) uint16_t w[2][kPanelSteps][16 * kBf16Cols]; };

// Columns of a panel.
inline int panel_steps(int64_t k, int64_t panel) {
  const int64_t left = k / kBf16Cols - panel * kPanelSteps;
  return static_cast<int>(left < kPanelSteps ? left : kPanelSteps);
}

// Tiles of any types, two of one type at a time: M::run<S, W>(tiles, the first of them, how many times W, ...).
template <class M> inline void multiply_all(const TileArgs* a, int count) {
  for (int i = 0; i < count;) {
    int same = 1;
    while (i + same < count && a[i + same].type == a[i].type) ++same;
    with_steps(a[i].type, [&](auto steps) {
      using S = decltype(steps);
      const Following following = {a, count, S::head(a->k) + a->k / kBf16Cols * S::step_bytes};
      if (same >= 2) M::template run<S, 2>(a, i, same / 2, following);
      if (same % 2 != 0) M::template run<S, 1>(a, i + same - 1, 1, following);
    });
    i += same;
  }
}

// ---- activations ----

// Round to nearest even. Every NaN becomes the same one.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

void round_bf16(const float* x, int64_t ldx, int64_t count, int64_t width, uint16_t* out, int64_t ldo) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t j = 0;
    for (; j + 16 <= width; j += 16)
      for (int64_t n = j; n < j + 16; ++n) out[i * ldo + n] = to_bf16(x[i * ldx + n]);
    for (; j < width; ++j) out[i * ldo + j] = to_bf16(x[i * ldx + j]);
  }
}

}  // namespace
