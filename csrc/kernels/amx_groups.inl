// Integers in groups (packed_groups.inl) times many activation rows in tile registers. Included by a tier file after
// amx32.inl, as whose blocks of 32 they go; FP8 has no product of tiles of its own.

namespace {

template <class Form, bool HAS_ZEROS> struct GroupBlocks {
  using P = Form;
  static constexpr bool has_zeros = HAS_ZEROS;
  GroupHead head;
  const uint8_t* lines;
  explicit GroupBlocks(const TileArgs& a) : head(a), lines(head.lines) {}
  vf scale(int64_t block, int) const { return head.scale(block); }
  vi minus_zero(int64_t block) const { return head.minus_zero(block); }
};

template <class P> void amx_group_tiles(const TileArgs* a, int count) {
  if (GroupForm(a->type).has_zero) return amx_block_tiles<GroupBlocks<P, true>>(a, count);
  amx_block_tiles<GroupBlocks<P, false>>(a, count);
}

// Tiles of one grouped type; adds to their acc.
void amx_grouped_tiles(const TileArgs* a, int count) {
  switch (GroupForm(a->type).codes) {
    case CodeKind::I4: return amx_group_tiles<PackedQ4_0>(a, count);
    case CodeKind::I8: return amx_group_tiles<PackedQ8_0>(a, count);
    case CodeKind::E2M1: return amx32_tiles<PackedNvfp4Group>(a, count);
    default:
      for (int i = 0; i < count; ++i) grouped_tile(a[i]);
  }
}

}  // namespace
