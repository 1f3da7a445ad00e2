// Whole operations over a worker pool: what to split, what to prepare, which kernel to call. No arithmetic here.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "runtime/pool.h"

namespace kt {

// How a matrix lies in memory and is computed with. TilesBf16: re-laid all the same, but many tokens are multiplied in
// bf16 where the tier can (bf16.inl), which is faster and not exact.
enum class Layout : int32_t { Rows = 0, Tiles = 1, TilesBf16 = 2 };

// A matrix in block layout, rows `row_bytes` apart.
struct WeightView {
  QType type;
  const uint8_t* data;
  int64_t rows, cols, row_bytes;
  int64_t tile_bytes = 0;  // of a re-laid matrix (packed.inl): 16 rows; 0: rows in block layout
  bool wants_bf16 = false;  // Layout::TilesBf16
};

// Throws std::invalid_argument for a shape that the type cannot have, or a type without such a layout.
WeightView make_weight(QType type, const uint8_t* data, int64_t rows, int64_t cols);

// Bytes that 16 rows take when re-laid. Throws std::invalid_argument for a type that is not.
int64_t packed_tile_bytes(QType type, int64_t cols);

// A re-laid matrix: ceil(rows / 16) tiles, the last one filled up with copies of the last row.
WeightView make_packed(QType type, const uint8_t* data, int64_t rows, int64_t cols);

WeightView make_view(QType type, const uint8_t* data, int64_t rows, int64_t cols, Layout layout);

// Whether products with the weight are of bf16: with re-laid BF16 always, with other types where that is wanted and the
// tokens are many. Throws std::invalid_argument for re-laid BF16 on a tier that cannot.
bool uses_bf16(const KernelTable& kernels, QType type, Layout layout, int64_t cols, bool is_many);
inline bool uses_bf16(const KernelTable& kernels, const WeightView& weight, bool is_many) {
  const Layout layout = weight.tile_bytes == 0 ? Layout::Rows : weight.wants_bf16 ? Layout::TilesBf16 : Layout::Tiles;
  return uses_bf16(kernels, weight.type, layout, weight.cols, is_many);
}

constexpr int64_t kManyTokens = 32;  // of a call: fewer are decode, which stays exact
constexpr int64_t kManyPairs = 8;    // (token, expert) per expert that is touched: fewer do not pay for unpacking

// Re-lays `count` matrices in block layout, all shaped as `like`, side by side into `out`.
void pack(WorkerPool& pool, const WeightView& like, const uint8_t* const* weights, int64_t count, uint8_t* out);

// FP8 codes [rows, cols] with scales [ceil(rows / 128), ceil(cols / 128)].
struct Fp8View {
  const uint8_t* codes;
  const float* scales;
};

// Re-lays `count` of them, side by side into `out`.
void pack_fp8(WorkerPool& pool, const Fp8View* weights, int64_t count, int64_t rows, int64_t cols, uint8_t* out);

// Points at rows first .. first + 15; lanes past the end repeat the last row.
void point_rows(const WeightView& weight, int64_t first, const uint8_t** rows);

// What a tile reads: rows first .. first + 15 of the weight, in either layout.
void point_tile(const WeightView& weight, int64_t first, TileArgs& args);

// Runs the kernel for the layout and the activations that each of `count` tiles points at; tokens are the same for all.
void run_tiles(const KernelTable& kernels, const TileArgs* args, int count);

constexpr int kTileGroup = 4;           // tiles that one task computes when there are enough tokens to share
constexpr int64_t kGroupedTokens = 8;   // from here on

// Activations in the form that `type` wants. fp32 input is used in place; int8 forms go to scratch memory.
class Activations {
 public:
  Activations(WorkerPool::Session& session, const float* x, int64_t rows, int64_t ldx, int64_t cols);
  // Makes the form of `type` available (once).
  void require(QType type);
  ActRows form_of(QType type) const;
  const ActRows& float_rows() const { return float_; }

 private:
  void quantize(ActForm form, ActRows& out);
  WorkerPool::Session& session_;
  const float* x_;
  int64_t rows_, cols_;
  ActRows float_, q32_, q256_;
};

// Tokens of one call of the kernels: rows ids[0 .. count - 1], or first .. first + count - 1 when ids is null.
struct TokenGroup {
  const int32_t* ids;
  int64_t first;
  int count;
};

// The activations of each group as TokenBlocks, if the tier's kernels for `type` want them; otherwise empty.
// A group that is too small for them has rows 0.
Span<TokenBlocks> make_blocks(WorkerPool::Session& session, const ActRows& act, QType type, int64_t cols, Span<TokenGroup> groups);

// Room for each group's activations rounded to bf16 (TokenBlocks::bf16), cols a multiple of 32; round_blocks fills it from
// fp32 rows.
Span<TokenBlocks> bf16_room(WorkerPool::Session& session, int64_t cols, Span<TokenGroup> groups);
void round_blocks(WorkerPool::Session& session, const float* x, int64_t ldx, int64_t cols, Span<TokenGroup> groups,
                  Span<TokenBlocks> blocks);

// Rows of int8 that are quantized piece by piece, in the form that a type wants.
struct QuantizedRows {
  ActForm form;
  int8_t* q;
  float* d;
  int16_t* sums;
  int64_t cols;

  // Columns first .. first + count - 1 of one row; whole blocks.
  void quantize(const KernelTable& kernels, const float* x, int64_t row, int64_t first, int64_t count) const;
  ActRows view() const;
};
QuantizedRows quantized_rows(WorkerPool::Session& session, QType type, int64_t rows, int64_t cols);

// Groups of tiles of 16 rows for every chunk of tokens. Tiles are spread over the nodes of the machine in order, as
// `pack` lays them out; tasks of one node are neighbours.
struct TileTasks {
  struct Task { int64_t chunk, tile; int count; };
  TileTasks(int64_t num_tiles, int64_t group_size, int64_t chunks, int num_nodes);
  Task at(int64_t i) const;
  int64_t first_tile(int node) const { return tiles * node / nodes; }

  int64_t tiles, group;
  int nodes;
  NodeEnds ends;
};

// Row tiles of a job and chunks of tokens within it.
struct TileSplit {
  int64_t row_tiles, token_chunks, chunk;
};
TileSplit split_tiles(int64_t rows, int64_t tokens);

// out[t, n] = sum_k x[t, k] weight[n, k] + bias[n]; bias may be null. x and out are contiguous.
void linear(WorkerPool& pool, const float* x, int64_t tokens, const WeightView& weight, const float* bias, float* out);

// Several matrices of the same columns times the same rows, in one go.
struct LinearPart {
  WeightView weight;
  const float* bias;  // or nullptr
  float* out;         // [tokens, rows]
};
void linear_parts(WorkerPool& pool, const float* x, int64_t tokens, std::initializer_list<LinearPart> parts);

// out[t, b, n] = sum_k x[t, b, k] weight[b, n, k]; x and out contiguous.
void batched_linear(WorkerPool& pool, const float* x, int64_t tokens, int64_t batch, const WeightView& weight, float* out);

void dequantize_rows(WorkerPool& pool, const WeightView& weight, const int64_t* ids, int64_t count, float* out);

void rms_norm(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t cols, float eps, float* out);

// out = act(gate) * up; gate null: act(up). n elements.
void activate(WorkerPool& pool, const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out);

void attention(WorkerPool& pool, const AttentionArgs& args);

// Best of `repeats`, all threads at once: bytes read per second, and operations per second in registers, with int8 and with
// bf16 (0 where the tier has none).
double read_bandwidth(WorkerPool& pool, const uint8_t* data, int64_t bytes, int repeats);
double int8_peak(WorkerPool& pool, int repeats);
double bf16_peak(WorkerPool& pool, int repeats);

}  // namespace kt
