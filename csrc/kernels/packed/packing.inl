// Re-lays weights in block layout into the tiles of packed.inl. Included by a tier file after it.

namespace {

// Bytes of a line, 8 at a time: words without a carry from one byte to the next, which compilers turn into vectors.
inline uint64_t load_word(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}
inline void store_word(uint8_t* p, uint64_t word) { std::memcpy(p, &word, 8); }
constexpr uint64_t all_bytes(uint64_t byte) { return byte * 0x0101010101010101u; }

// out: `bytes` whose low nibbles are those of `low`, whose high ones those of `high`, which have nothing above them.
inline void join_nibbles(const uint8_t* low, const uint8_t* high, int bytes, uint8_t* out) {
  for (int i = 0; i < bytes; i += 8)
    store_word(out + i, (load_word(low + i) & all_bytes(15)) | (load_word(high + i) & all_bytes(15)) << 4);
}

// A line of bits FROM .. FROM + BITS - 1 of COUNT steps, STRIDE bytes apart, from the lowest up.
template <int FROM, int COUNT, int BITS, int STRIDE> inline void join_bits(const uint8_t* steps, uint8_t* out) {
  for (int i = 0; i < 64; i += 8) {
    uint64_t word = 0;
    for (int j = 0; j < COUNT; ++j)
      word |= (load_word(steps + STRIDE * j + i) >> FROM & all_bytes((1 << BITS) - 1)) << (BITS * j);
    store_word(out + i, word);
  }
}

// 64 steps of unpacked weights into lines.
template <class P> void pack_steps(const uint8_t* steps, uint8_t* out) {
  constexpr int low_bits = kGroupRun<P> == 8 ? 4 : 2;
  for (int g = 0; g < 4; ++g) {
    const uint8_t* q = steps + 1024 * g;
    if constexpr (low_bits == 4)
      join_nibbles(q, q + 512, 512, out + P::lines + 512 * g);
    else
      for (int i = 0; i < 4; ++i) join_bits<0, 4, 2, 256>(q + 64 * i, out + P::lines + 256 * g + 64 * i);
    if constexpr (P::upper_bits == 1)
      for (int half = 0; half < 2; ++half)
        join_bits<low_bits, 8, 1, 64>(q + 512 * half, out + P::bits + 128 * g + 64 * half);
    if constexpr (P::upper_bits == 2)
      for (int i = 0; i < 4; ++i) join_bits<low_bits, 4, 2, 256>(q + 64 * i, out + P::bits + 256 * g + 64 * i);
  }
}

template <class P> void pack_block256(const uint8_t* const* rows, int64_t b, uint8_t* out, uint8_t* head) {
  using F = typename P::F;
  alignas(64) uint8_t unpacked[16][kTileCols], steps[kTileCols * 16];
  const auto block = [&](int r) { return rows[r] + kRowHead<F> + b * F::bytes; };
  for (int r = 0; r < 16; ++r) unpack256<F>(block(r), unpacked[r]);
  interleave(unpacked, kTileCols, steps);
  pack_steps<P>(steps, out);
  for (int r = 0; r < 16; ++r) {
    const uint8_t* p = block(r);
    P::pack_scales(p, r, out);
    if constexpr (kRowHead<F> > 0) {
      const float d = row_scale<kRowHead<F>>(rows[r]);
      std::memcpy(head + 4 * r, &d, 4);
    } else if constexpr (F::has_min) {
      std::memcpy(out + 2 * r, p, 2);
      std::memcpy(out + 32 + 2 * r, p + 2, 2);
    } else {
      std::memcpy(head + 32 * b + 2 * r, p + F::d_at, 2);
    }
  }
}

template <class P> void pack_tile256(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const int64_t blocks = k / 256, head = super_head<P>(blocks);
  std::memset(out, 0, static_cast<size_t>(head));
  for (int64_t b = 0; b < blocks; ++b) pack_block256<P>(rows, b, out + head + b * P::bytes, out);
}

// Two blocks at a time: 64 columns are interleaved in one go.
template <class P> void pack_tile32(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  constexpr int d_bytes = P::F::bytes % 2 == 0 ? 2 : 1;  // MXFP4's exponent is a byte
  const int64_t blocks = k / 32, head = P::head(blocks);
  std::memset(out + 16 * d_bytes * blocks, 0, static_cast<size_t>(head - 16 * d_bytes * blocks));
  alignas(64) uint8_t unpacked[16][64] = {}, steps[64 * 16];
  const uint8_t* from[16];
  for (int r = 0; r < 16; ++r) from[r] = unpacked[r];
  for (int64_t b = 0; b < blocks; b += 2) {
    const int count = blocks - b > 1 ? 2 : 1;
    for (int r = 0; r < 16; ++r)
      for (int i = 0; i < count; ++i) {
        const uint8_t* p = rows[r] + (b + i) * P::F::bytes;
        std::memcpy(out + 16 * d_bytes * (b + i) + d_bytes * r, p, d_bytes);
        if constexpr (P::bytes == 512)
          std::memcpy(unpacked[r] + 32 * i, p + d_bytes, 32);
        else
          storeb(unpacked[r] + 32 * i, nibbles16(p + d_bytes));  // columns i and 16 + i are in one byte
      }
    transpose16(from, steps);
    for (int i = 0; i < count; ++i) {
      const uint8_t* q = steps + 512 * i;
      uint8_t* lines = out + head + (b + i) * P::bytes;
      if constexpr (P::bytes == 512)
        std::memcpy(lines, q, 512);
      else
        join_nibbles(q, q + 256, 256, lines);
    }
  }
}

template <class P> struct Kernel256 {
  using Packed = P;
  using Steps = Steps256<P>;
  static void tile(const TileArgs& a) { packed256_tile<P>(a); }
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile256<P>(rows, k, out); }
};
template <> struct Kernel<QType::Q4_K> : Kernel256<PackedQ4K> {};
template <> struct Kernel<QType::Q5_K> : Kernel256<PackedQ5K> {};
template <> struct Kernel<QType::Q6_K> : Kernel256<PackedQ6K> {};

template <class P> struct Kernel32 {
  using Packed = P;
  using Steps = Steps32<P>;
  static void tile(const TileArgs& a) { packed32_tile<P>(a); }
  static void pack(const uint8_t* const* rows, int64_t k, uint8_t* out) { pack_tile32<P>(rows, k, out); }
};
template <> struct Kernel<QType::Q8_0> : Kernel32<PackedQ8_0> {};
template <> struct Kernel<QType::Q4_0> : Kernel32<PackedQ4_0> {};

// Two columns of every row side by side, see bf16.inl.
void pack_bf16(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  for (int64_t column = 0; column < k; column += 32) {
    const uint8_t* from[16];
    for (int r = 0; r < 16; ++r) from[r] = rows[r] + 2 * column;
    transpose16(from, out + 32 * column);
  }
}

}  // namespace
