// Matrices of weights as they lie in memory, in block layout or packed, and the packing.
#pragma once
#include <cstdint>

#include "runtime/pool.h"

namespace kt {

// How a matrix lies in memory and is computed with. TilesBf16: packed all the same, but many tokens are multiplied in
// bf16 where the tier can (bf16.inl), which is faster and not exact.
enum class Layout : int32_t { Rows = 0, Tiles = 1, TilesBf16 = 2 };

// A matrix in block layout, rows `row_bytes` apart.
struct WeightView {
  QType type;
  const uint8_t* data;
  int64_t rows, cols, row_bytes;
  int64_t tile_bytes = 0;   // of a packed matrix (packed.inl): 16 rows; 0: rows in block layout
  bool wants_bf16 = false;  // Layout::TilesBf16
};

// Throws std::invalid_argument for a shape that the type cannot have, or a type without such a layout.
WeightView make_weight(QType type, const uint8_t* data, int64_t rows, int64_t cols);

// Bytes that 16 rows take when packed. Throws std::invalid_argument for a type that is not.
int64_t packed_tile_bytes(QType type, int64_t cols);

// A packed matrix: ceil(rows / 16) tiles, the last one filled up with copies of the last row.
WeightView make_packed(QType type, const uint8_t* data, int64_t rows, int64_t cols);

WeightView make_view(QType type, const uint8_t* data, int64_t rows, int64_t cols, Layout layout);

// Whether products with the weight are of bf16: with packed BF16 always, with other types where that is wanted and the
// tokens are many. Throws std::invalid_argument for packed BF16 on a tier that cannot.
bool uses_bf16(const KernelTable& kernels, QType type, Layout layout, int64_t cols, bool is_many);
inline bool uses_bf16(const KernelTable& kernels, const WeightView& weight, bool is_many) {
  const Layout layout = weight.tile_bytes == 0 ? Layout::Rows : weight.wants_bf16 ? Layout::TilesBf16 : Layout::Tiles;
  return uses_bf16(kernels, weight.type, layout, weight.cols, is_many);
}

// Bytes that a product with all of it reads.
inline int64_t weight_bytes(const WeightView& weight) {
  return weight.tile_bytes == 0 ? weight.rows * weight.row_bytes
                                : (weight.rows + kTileRows - 1) / kTileRows * weight.tile_bytes;
}

constexpr int64_t kManyTokens = 32;  // of a call: fewer are decode, which stays exact
constexpr int64_t kManyPairs = 8;    // (token, expert) per expert that is touched: fewer do not pay for unpacking

// Re-lays `count` matrices in block layout, all shaped as `like`, side by side into `out`.
void pack(WorkerPool& pool, const WeightView& like, const uint8_t* const* weights, int64_t count, uint8_t* out);

// Re-lays the rows of `some`, in block layout, into tiles at `out`, on the calling thread.
void pack_rows(const KernelTable& kernels, const WeightView& some, uint8_t* out);

// FP8 codes [rows, cols] with scales [ceil(rows / 128), ceil(cols / 128)].
struct Fp8View {
  const uint8_t* codes;
  const float* scales;
};

// Re-lays `count` of them, side by side into `out`.
void pack_fp8(WorkerPool& pool, const Fp8View* weights, int64_t count, int64_t rows, int64_t cols, uint8_t* out);

struct Bytes {
  const uint8_t* data;
  int64_t bytes;
};

// Copies `count` parts side by side into `out`, which no part is in. Those of files are read from there, as in `pack`.
void copy_parts(WorkerPool& pool, const Bytes* parts, int64_t count, uint8_t* out);

// Nanoseconds that threads of all pools took so far to read what they packed or copied, and to pack it.
struct PackTimes { int64_t read_ns, pack_ns; };
PackTimes pack_times();

// Points at rows first .. first + 15; lanes past the end repeat the last row.
void point_rows(const WeightView& weight, int64_t first, const uint8_t** rows);

// What a tile reads: rows first .. first + 15 of the weight, in either layout.
void point_tile(const WeightView& weight, int64_t first, TileArgs& args);

}  // namespace kt
