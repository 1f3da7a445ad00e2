// See activations.h.
#include "ops/linear/activations.h"

#include <algorithm>
#include <cstring>

#include "ops/linear/rows.h"
#include "runtime/format_info.h"

namespace kt {
namespace {

constexpr int64_t kPiece = 256;  // columns

ActForm form_for(QType type) { return format_info(type).form; }

}  // namespace

Activations::Activations(WorkerPool::Session& session, const float* x, int64_t rows, int64_t ldx, int64_t cols)
    : session_(session), x_(x), rows_(rows), cols_(cols) {
  float_.x = x;
  float_.ldx = ldx;
}

void Activations::require(QType type) {
  const ActForm form = form_for(type);
  ActRows* target = form == ActForm::Q32 ? &q32_ : form == ActForm::Q256 ? &q256_ : nullptr;
  if (target != nullptr && target->q == nullptr) quantize(type, *target);
}

int Activations::planes_of(QType type) const { return form_for(type) == ActForm::Float ? 1 : session_.planes(); }

ActRows Activations::form_of(QType type) const {
  const ActForm form = form_for(type);
  return form == ActForm::Q32 ? q32_ : form == ActForm::Q256 ? q256_ : float_;
}

void Activations::quantize(QType type, ActRows& out) {
  const QuantizedRows made = quantized_rows(session_, type, rows_, cols_);
  for_rows(session_, rows_, rows_per_task(cols_),
           [&](int64_t r) { made.quantize(session_.kernels(), x_ + r * float_.ldx, r, 0, cols_); });
  out = made.view();
}

void QuantizedRows::quantize_plane(const KernelTable& kernels, const float* x, int64_t row, int64_t first,
                                   int64_t count) const {
  const int64_t at = row * (cols / block) + first / block;
  kernels.quantize_row(form, x, count, q + row * cols + first, d + at, sums + at * sums_per_block);
}

void QuantizedRows::quantize(const KernelTable& kernels, const float* x, int64_t row, int64_t first,
                             int64_t count) const {
  quantize_plane(kernels, x, planes * row, first, count);
  if (planes == 1) return;
  const int8_t* whole = q + 2 * row * cols + first;
  const float* scales = d + 2 * row * (cols / block) + first / block;
  float left[kPiece];
  for (int64_t from = 0; from < count; from += kPiece) {
    const int64_t width = std::min(kPiece, count - from);
    for (int64_t i = 0; i < width; ++i)
      left[i] = x[from + i] - scales[(from + i) / block] * static_cast<float>(whole[from + i]);
    quantize_plane(kernels, left, 2 * row + 1, first + from, width);
  }
}

void add_planes(float* acc, int count, int planes) {
  if (planes == 1) return;
  for (int t = 0; t < count; ++t) {
    const float *first = acc + 2 * t * kTileRows, *second = first + kTileRows;
    for (int64_t r = 0; r < kTileRows; ++r) acc[t * kTileRows + r] = first[r] + second[r];
  }
}

ActRows QuantizedRows::view() const {
  const int64_t blocks = cols / block;
  return {nullptr, 0, q, cols, d, blocks, sums, blocks * sums_per_block};
}

QuantizedRows quantized_rows(WorkerPool::Session& session, QType type, int64_t rows, int64_t cols) {
  const ActForm form = form_for(type);
  const int64_t block = form == ActForm::Q32 ? 32 : 256,
                per_block = form == ActForm::Q32 ? kSumsPerBlock : kSumsPerSuper, held = rows * session.planes(),
                blocks = held * (cols / block);
  return {form,
          session.planes(),
          block,
          per_block,
          cols,
          session.scratch<int8_t>(held * cols),
          session.scratch<float>(blocks),
          session.scratch<int16_t>(blocks * per_block)};
}

namespace {

void copy_piece(const ActRows& act, ActForm form, const TokenGroup& group, int64_t piece, int64_t cols,
                const TokenBlocks& out) {
  const int64_t width = std::min(kPiece, cols - piece * kPiece), blocks = width / 32;
  for (int64_t t = 0; t < group.count; ++t) {
    const int64_t row = group.ids != nullptr ? group.ids[t] : group.first + t, to = piece * out.rows + t;
    std::memcpy(out.q + to * kPiece, act.q + row * act.ldq + piece * kPiece, static_cast<size_t>(width));
    if (form == ActForm::Q256) {
      std::memcpy(out.sums + to * 8, act.sums + row * act.lds + piece * kSumsPerSuper + 16, 16);
      std::memcpy(out.sums16 + to * 16, act.sums + row * act.lds + piece * kSumsPerSuper, 32);
      out.d[to * 8] = act.d[row * act.ldd + piece];
    } else {
      const int16_t* sums = act.sums + row * act.lds + piece * 8 * kSumsPerBlock;
      for (int64_t b = 0; b < blocks; ++b) out.sums[to * 8 + b] = sums[kSumsPerBlock * b];
      std::memcpy(out.d + to * 8, act.d + row * act.ldd + piece * 8, static_cast<size_t>(4 * blocks));
    }
  }
}

}  // namespace

Span<TokenBlocks> make_blocks(WorkerPool::Session& session, const ActRows& act, QType type, int64_t cols,
                              Span<TokenGroup> groups) {
  const ActForm form = form_for(type);
  const int least = session.kernels().min_block_tokens;
  if (least == 0 || form == ActForm::Float) return {};
  const int64_t pieces = (cols + kPiece - 1) / kPiece;
  const Span<TokenBlocks> made = session.span<TokenBlocks>(groups.count);
  Span<int64_t> filled = {session.scratch<int64_t>(groups.count), 0};
  for (int64_t i = 0; i < groups.count; ++i) {
    made[i] = {};
    if (groups[i].count < least) continue;
    const int64_t rows = (groups[i].count + 15) / 16 * 16;  // a kernel may read whole tiles
    made[i] = {session.scratch<int8_t>(pieces * rows * kPiece), session.scratch<int16_t>(pieces * rows * 8),
               session.scratch<float>(pieces * rows * 8), rows,
               form == ActForm::Q256 ? session.scratch<int16_t>(pieces * rows * 16) : nullptr};
    filled[filled.count++] = i;
  }
  session.run(filled.count * pieces, [&](int64_t i) {
    const int64_t group = filled[i / pieces];
    copy_piece(act, form, groups[group], i % pieces, cols, made[group]);
  });
  return made;
}

Span<TokenBlocks> bf16_room(WorkerPool::Session& session, int64_t cols, Span<TokenGroup> groups) {
  const Span<TokenBlocks> made = session.span<TokenBlocks>(groups.count);
  for (int64_t i = 0; i < groups.count; ++i) {
    made[i] = {};
    made[i].rows = (groups[i].count + 15) / 16 * 16;  // a kernel may read whole tiles
    made[i].bf16 = session.scratch<uint16_t>(made[i].rows * cols);
  }
  return made;
}

void round_blocks(WorkerPool::Session& session, const float* x, int64_t ldx, int64_t cols, Span<TokenGroup> groups,
                  Span<TokenBlocks> blocks) {
  const int64_t pieces = (cols + kPiece - 1) / kPiece;
  session.run(groups.count * pieces, [&](int64_t i) {
    const TokenGroup& group = groups[i / pieces];
    const TokenBlocks& to = blocks[i / pieces];
    const int64_t first = i % pieces * kPiece, steps = std::min(kPiece, cols - first) / kBf16Cols;
    uint16_t* out = to.bf16 + first * to.rows;
    for (int64_t t = 0; t < group.count; ++t) {
      const int64_t row = group.ids != nullptr ? group.ids[t] : group.first + t;
      session.kernels().round_bf16(x + row * ldx + first, kBf16Cols, steps, kBf16Cols, out + t * kBf16Cols,
                                   to.rows * kBf16Cols);
    }
  });
}

}  // namespace kt
