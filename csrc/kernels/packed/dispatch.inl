// Which kernel a re-laid type has, and which packs it. Included by a tier file after packing.inl; types with kernels in
// other files of the tier are in kernels/parts.h.

namespace {

// Adds to a.acc. has_vbmi: see vbmi.inl.
void packed_tile(const TileArgs& a, bool has_vbmi) {
  if (is_grouped(a.type)) return parts::grouped_tile(a);
  switch (a.type) {
    case QType::Q8_0: return packed32_tile<PackedQ8_0>(a);
    case QType::Q4_0: return packed32_tile<PackedQ4_0>(a);
    case QType::Q4_K: return packed256_tile<PackedQ4K>(a);
    case QType::Q5_K: return packed256_tile<PackedQ5K>(a);
    case QType::Q6_K: return packed256_tile<PackedQ6K>(a);
    case QType::IQ4_XS: return in_few_parts<FewSigned>(a);
    case QType::F8_E4M3: return parts::fp8_tile(a);
    case QType::Q4_1:
    case QType::Q5_0:
    case QType::Q5_1:
    case QType::Q2_K:
    case QType::Q3_K:
    case QType::IQ4_NL:
    case QType::TQ1_0:
    case QType::TQ2_0:
    case QType::MXFP4:
    case QType::NVFP4:
    case QType::Q1_0: return parts::low_tile(a);
    default: return parts::packed_grid_tile(a, has_vbmi);  // make_packed refuses the others
  }
}

void packed_tiles(const TileArgs* args, int count, bool has_vbmi) {
  for (int i = 0; i < count; ++i) {
    for (int t = 0; t < args[i].num_tokens; ++t) store(args[i].acc + t * 16, zero());
    packed_tile(args[i], has_vbmi);
  }
}

void pack_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  if (is_grouped(type)) return parts::pack_grouped(type, rows, k, out);
  switch (type) {
    case QType::Q8_0: return pack_tile32<PackedQ8_0>(rows, k, out);
    case QType::Q4_0: return pack_tile32<PackedQ4_0>(rows, k, out);
    case QType::Q4_K: return pack_tile256<PackedQ4K>(rows, k, out);
    case QType::Q5_K: return pack_tile256<PackedQ5K>(rows, k, out);
    case QType::Q6_K: return pack_tile256<PackedQ6K>(rows, k, out);
    case QType::IQ4_XS: return pack_tile256<PackedIQ4XS>(rows, k, out);
    case QType::MXFP4: return pack_tile32<PackedMXFP4>(rows, k, out);
    case QType::BF16: return pack_bf16(rows, k, out);
    case QType::Q4_1:
    case QType::Q5_0:
    case QType::Q5_1:
    case QType::Q2_K:
    case QType::Q3_K:
    case QType::IQ4_NL:
    case QType::TQ1_0:
    case QType::TQ2_0:
    case QType::NVFP4:
    case QType::Q1_0: return parts::pack_low_tile(type, rows, k, out);
    default: return parts::pack_grid(type, rows, k, out);
  }
}

// Columns and bytes of a block of the types that have no other kernels for rows.
struct BlockSize { int64_t cols, bytes; };
inline BlockSize relaid_block(QType type) {
  switch (type) {
    case QType::Q4_1: return {32, 20};
    case QType::Q5_0: return {32, 22};
    case QType::Q5_1: return {32, 24};
    case QType::Q2_K: return {256, 84};
    case QType::Q3_K: return {256, 110};
    case QType::IQ4_NL: return {32, 18};
    case QType::IQ4_XS: return {256, 136};
    case QType::TQ1_0: return {256, 54};
    case QType::TQ2_0: return {256, 66};
    case QType::NVFP4: return {64, 36};
    case QType::Q1_0: return {128, 18};
    default: return {32, 17};  // MXFP4
  }
}

// A block at a time is re-laid and used: for the few weights that stay in block layout.
void relaid_tile(const TileArgs& a) {
  const QType type = a.type;
  const auto [block, block_bytes] = relaid_block(type);
  alignas(64) uint8_t room[PackedIQ4XS::bytes + 64];
  for (int64_t b = 0; b < a.k / block; ++b) {
    const uint8_t* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = a.rows[r] + b * block_bytes;
    pack_tile(type, rows, block, room);
    TileArgs one = a;
    one.packed = room;
    one.k = block;
    one.act.q += b * block;
    one.act.d += block == 256 ? b : b * block / 32;
    one.act.sums += block == 256 ? b * kSumsPerSuper : b * block / 32 * kSumsPerBlock;
    packed_tile(one, false);  // no type with a grid
  }
}

}  // namespace
