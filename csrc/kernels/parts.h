// Kernels of a tier that are compiled in files of their own, by kind of weights, so that several cores compile a tier.
// Each part (tiers/parts/) is compiled once for every tier that has all kernels; tiers that replace some of them call
// those of the tier that they build on. KT_PARTS, from CMakeLists.txt, is the namespace of the tier whose parts they
// are.
//
// What these functions do stands where they are: packed/dispatch.inl, small.inl, groups.inl, fp8.inl, grid.inl.
#pragma once
#include "runtime/types.h"

namespace kt {
namespace KT_PARTS {

// Re-laid weights. They add to a.acc, but for packed_tiles, which sets it. has_vbmi: see packed/vbmi.inl.
void packed_tiles(const TileArgs* args, int count, bool has_vbmi);
void low_tile(const TileArgs& a);
void grouped_tile(const TileArgs& a);
void fp8_tile(const TileArgs& a);
void packed_grid_tile(const TileArgs& a, bool has_vbmi);

// Weights in rows, of types that are computed with in packed form only. They add to a.acc.
void tile_by_blocks(const TileArgs& a);
void grouped_by_blocks(const TileArgs& a);
void grid_rows_tile(const TileArgs& a);

// Re-laying 16 rows of k columns.
void pack_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out);
void pack_low_tile(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out);
void pack_grouped(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out);
void pack_grid(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out);
void pack_fp8_tile(const uint8_t* const* rows, const float* scales, int64_t k, uint8_t* out);

void dequantize_grouped(QType type, const uint8_t* row, int64_t k, float* out);

}  // namespace KT_PARTS
}  // namespace kt

namespace parts = kt::KT_PARTS;
