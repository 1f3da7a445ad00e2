// Q2_K and Q3_K in tiles of 16 rows (packed.inl), which computes with them. Included by a tier file after packing.inl.
//
//   Q2_K  256 columns   d[16], dmin[16], scales and minima, 16 lines                        84 B a row and block
//   Q3_K  256 columns   scales - 32, 16 lines, 8 lines of third bits                        114 B (110 in the file)
//
// Lines of 256 columns: line 4 g + i (i < 4, g < 4) holds steps 16 g + i, + 4, + 8, + 12, two bits each, from the
// lowest up. Third bits lie as the fifth ones of Q5_K. A byte of Q2_K's scales holds a scale and a minimum, as in the
// file.

namespace {

struct PackedQ2K {
  using F = FormatQ2K;
  static constexpr int upper_bits = 0;
  static constexpr int64_t bytes = 64 + 256 + 1024, scales = 64, minima = 64, lines = 320;
  template <int I> static wb low(const uint8_t*, int, wb line) { return move_bits<I / 4 * 2, 0>(line, 3); }
  template <int I> static wb high(const uint8_t*, int, wb line) { return move_bits<4 + I / 4 * 2, 0>(line, 3); }
};
struct PackedQ3K {
  using F = FormatQ3K;
  static constexpr int offset = 4, upper_bits = 1;
  static constexpr int64_t bytes = 256 + 1024 + 512, scales = 0, minima = 0, lines = 256, bits = 256 + 1024;
  template <int I> static wb low(const uint8_t* p, int g, wb line) {
    return or_bytes(move_bits<I / 4 * 2, 0>(line, 3), move_bits<I, 2>(load_wb(p + bits + 128 * g), 1));
  }
  template <int I> static wb high(const uint8_t* p, int g, wb line) {
    return or_bytes(move_bits<4 + I / 4 * 2, 0>(line, 3), move_bits<I, 2>(load_wb(p + bits + 128 * g + 64), 1));
  }
};
template <> constexpr int kGroupRun<PackedQ2K> = 4;
template <> constexpr int kGroupRun<PackedQ3K> = 4;

constexpr int32_t kNibblePair = 0x000f000f;
template <> inline vi load_scales<PackedQ2K>(const uint8_t* p, int j) {
  return andi(pairs_u8(p + PackedQ2K::scales + 32 * j), set1i(kNibblePair));
}
template <> inline vi load_minima<PackedQ2K>(const uint8_t* p, int j) {
  return andi(sar<4>(pairs_u8(p + PackedQ2K::scales + 32 * j)), set1i(kNibblePair));
}
template <> inline vi load_minima<PackedQ3K>(const uint8_t* p, int j) { return times4(pairs_s8(p + 32 * j)); }

template <class P> void pack_tile_k2k3(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  using F = typename P::F;
  const int64_t blocks = k / 256, head = F::has_min ? 0 : head_bytes(blocks);
  std::memset(out, 0, static_cast<size_t>(head));
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* to = out + head + b * P::bytes;
    alignas(64) uint8_t unpacked[16][kTileCols], steps[kTileCols * 16];
    for (int r = 0; r < 16; ++r) {
      const uint8_t* p = rows[r] + b * F::bytes;
      unpack256<F>(p, unpacked[r]);
      if constexpr (F::has_min) {
        for (int s = 0; s < 16; ++s) pack_pair(to + P::scales, s, r, p[s]);
        std::memcpy(to + 2 * r, p + 80, 2);
        std::memcpy(to + 32 + 2 * r, p + 82, 2);
      } else {
        int8_t scales[16];
        unpack_q3_scales(p + 96, scales);
        for (int s = 0; s < 16; ++s) pack_pair(to + P::scales, s, r, static_cast<uint8_t>(scales[s]));
        std::memcpy(out + 32 * b + 2 * r, p + 108, 2);
      }
    }
    interleave(unpacked, kTileCols, steps);
    pack_steps<P>(steps, to);
  }
}

template <class P> struct KernelK2K3 : Kernel256<P> {
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile_k2k3<P>(rows, k, out); }
};
template <> struct Kernel<QType::Q2_K> : KernelK2K3<PackedQ2K> {};
template <> struct Kernel<QType::Q3_K> : KernelK2K3<PackedQ3K> {};

}  // namespace
