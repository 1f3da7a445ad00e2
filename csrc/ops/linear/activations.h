// Rows of activations in the forms that kernels read: fp32, int8 with scales, blocks of tokens, bf16.
//
// With two planes (Session::planes) a row x is the sum of two rows of int8, which are neighbours: the row quantized,
// and what that leaves of x quantized by the same rules. Kernels multiply both, and `add_planes` adds what they give:
// int32 sums and their order stay those of one plane, so results do not depend on other rows here either. A block's
// largest error falls from 2^-8 of its largest number to 2^-16.
#pragma once
#include <cstdint>

#include "runtime/pool.h"

namespace kt {

// Activations in the form that `type` wants. fp32 input is used in place; int8 forms go to scratch memory.
class Activations {
 public:
  Activations(WorkerPool::Session& session, const float* x, int64_t rows, int64_t ldx, int64_t cols);
  // Makes the form of `type` available (once).
  void require(QType type);
  ActRows form_of(QType type) const;
  // Rows of `form_of(type)` for each row of x: 1 for fp32.
  int planes_of(QType type) const;
  const ActRows& float_rows() const { return float_; }

 private:
  void quantize(QType type, ActRows& out);
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
Span<TokenBlocks> make_blocks(WorkerPool::Session& session, const ActRows& act, QType type, int64_t cols,
                              Span<TokenGroup> groups);

// Room for each group's activations rounded to bf16 (TokenBlocks::bf16), cols a multiple of 32; round_blocks fills it
// from fp32 rows.
Span<TokenBlocks> bf16_room(WorkerPool::Session& session, int64_t cols, Span<TokenGroup> groups);
void round_blocks(WorkerPool::Session& session, const float* x, int64_t ldx, int64_t cols, Span<TokenGroup> groups,
                  Span<TokenBlocks> blocks);

// Rows of int8 that are quantized piece by piece, in the form that a type wants.
struct QuantizedRows {
  ActForm form;
  int planes;
  int64_t block, sums_per_block, cols;
  int8_t* q;
  float* d;
  int16_t* sums;

  // Columns first .. first + count - 1 of one row of activations; whole blocks.
  void quantize(const KernelTable& kernels, const float* x, int64_t row, int64_t first, int64_t count) const;
  ActRows view() const;

 private:
  void quantize_plane(const KernelTable& kernels, const float* x, int64_t row, int64_t first, int64_t count) const;
};
QuantizedRows quantized_rows(WorkerPool::Session& session, QType type, int64_t rows, int64_t cols);

// Of one tile of kTileRows lanes: acc[t] = acc[planes t] + acc[planes t + 1] for t < count; with one plane it is so.
void add_planes(float* acc, int count, int planes);

}  // namespace kt
