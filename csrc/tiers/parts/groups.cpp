// Weights in groups, and FP8.
#include KT_SIMD

#include "tiers/products.inl"

namespace kt {
namespace KT_PARTS {

void grouped_tile(const TileArgs& a) { ::grouped_tile(a); }
void fp8_tile(const TileArgs& a) { ::fp8_tile(a); }
void grouped_by_blocks(const TileArgs& a) { ::grouped_by_blocks(a); }
void pack_grouped(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  ::pack_grouped(type, rows, k, out);
}
void pack_fp8_tile(const uint8_t* const* rows, const float* scales, int64_t k, uint8_t* out) {
  ::pack_fp8_tile(rows, scales, k, out);
}
void dequantize_grouped(QType type, const uint8_t* row, int64_t k, float* out) {
  ::dequantize_grouped(type, row, k, out);
}

}  // namespace KT_PARTS
}  // namespace kt
