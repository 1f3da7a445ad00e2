// Which kernel a packed type has, and which packs it. Included by a tier file after packing.inl; types with kernels in
// other files of the tier are in kernels/parts.h.

namespace {

// Adds to a.acc. has_vbmi: see vbmi.inl.
void packed_tile(const TileArgs& a, bool has_vbmi) {
  if (is_grouped(a.type)) return parts::grouped_tile(a);
  with_format(a.type, [&](auto format) {
    constexpr const FormatInfo& info = decltype(format)::info;
    if constexpr (info.kernels == Kernels::Packed) {
      static_assert(kIsPackedAsSaid<decltype(format)>);
      Kernel<info.type>::tile(a);
    } else if constexpr (info.kernels == Kernels::Low)
      parts::low_tile(a);
    else if constexpr (is_staged(info))
      parts::packed_grid_tile(a, has_vbmi);
    else if constexpr (info.kernels == Kernels::Fp8)
      parts::fp8_tile(a);
  });
}

void packed_tiles(const TileArgs* args, int count, bool has_vbmi) {
  for (int i = 0; i < count; ++i) {
    for (int t = 0; t < args[i].num_tokens; ++t) store(args[i].acc + t * 16, zero());
    packed_tile(args[i], has_vbmi);
  }
}

void pack_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  if (is_grouped(type)) return parts::pack_grouped(type, rows, k, out);
  if (type == QType::BF16) return pack_bf16(rows, k, out);
  with_format(type, [&](auto format) {
    constexpr const FormatInfo& info = decltype(format)::info;
    if constexpr (info.kernels == Kernels::Packed)
      Kernel<info.type>::pack(rows, k, out);
    else if constexpr (info.kernels == Kernels::Low)
      parts::pack_low_tile(type, rows, k, out);
    else if constexpr (is_staged(info))
      parts::pack_grid(type, rows, k, out);
  });
}

constexpr int64_t max_packed_bytes() {
  int64_t most = 0;
  for (const FormatInfo& info : kFormats) most = info.packed_bytes > most ? info.packed_bytes : most;
  return most;
}

// A block at a time is packed and used: for the few weights that stay in block layout.
template <class Format> void tile_by_blocks_of(const TileArgs& a) {
  constexpr int block = Format::info.block;
  alignas(64) uint8_t room[max_packed_bytes() + 64];
  for (int64_t b = 0; b < a.k / block; ++b) {
    const uint8_t* rows[kTileRows];
    [[maybe_unused]] uint8_t joined[kTileRows][Format::info.row_head + Format::info.bytes];
    for (int r = 0; r < kTileRows; ++r) {
      rows[r] = a.rows[r] + Format::info.row_head + b * Format::info.bytes;
      if constexpr (Format::info.row_head > 0) {  // a row of one block
        std::memcpy(joined[r], a.rows[r], Format::info.row_head);
        std::memcpy(joined[r] + Format::info.row_head, rows[r], Format::info.bytes);
        rows[r] = joined[r];
      }
    }
    pack_tile(Format::type, rows, block, room);
    TileArgs one = a;
    one.packed = room;
    one.k = block;
    one.act.q += b * block;
    one.act.d += block == 256 ? b : b * block / 32;
    one.act.sums += block == 256 ? b * kSumsPerSuper : b * block / 32 * kSumsPerBlock;
    packed_tile(one, false);  // no type with a grid
  }
}

// Of types that are not computed with in rows: see RowKernel.
void tile_by_blocks(const TileArgs& a) {
  with_format(a.type, [&](auto format) {
    constexpr Kernels kernels = decltype(format)::info.kernels;
    if constexpr (kernels == Kernels::Packed || kernels == Kernels::Low) tile_by_blocks_of<decltype(format)>(a);
  });
}

}  // namespace
