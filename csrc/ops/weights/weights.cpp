// See weights.h.
#include "ops/weights/weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/linear/tiles.h"
#include "runtime/files.h"
#include "runtime/format_info.h"
#include "runtime/grouped.h"

namespace kt {
namespace {

int64_t bytes_of_row(const FormatInfo& info, int64_t cols) { return info.row_head + cols / info.block * info.bytes; }

const FormatInfo& checked_info(QType type, int64_t rows, int64_t cols) {
  const FormatInfo& info = format_info(type);
  if (rows < 0 || cols < 0 || cols % info.block != 0)
    throw std::invalid_argument("weight of " + std::to_string(rows) + " rows and " + std::to_string(cols) +
                                " columns cannot be " + info.name);
  return info;
}

}  // namespace

WeightView make_weight(QType type, const uint8_t* data, int64_t rows, int64_t cols) {
  const FormatInfo& info = checked_info(type, rows, cols);
  if (type == QType::F8_E4M3) throw std::invalid_argument("FP8 weights are computed with in packed form only");
  return {type, data, rows, cols, bytes_of_row(info, cols)};
}

void point_rows(const WeightView& weight, int64_t first, const uint8_t** rows) {
  for (int64_t r = 0; r < kTileRows; ++r)
    rows[r] = weight.data + std::min(first + r, weight.rows - 1) * weight.row_bytes;
}

int64_t packed_tile_bytes(QType type, int64_t cols) {
  const FormatInfo& info = format_info(type);
  if (is_grouped(type)) return GroupForm(type).tile_bytes(cols);
  if (info.packed_bytes == 0) throw std::invalid_argument(std::string(info.name) + " has no packed form");
  if (type == QType::BF16 && cols % kBf16Cols != 0)
    throw std::invalid_argument("BF16 has a packed form for multiples of 32 columns only");
  const int64_t head = (cols + info.head_cols - 1) / info.head_cols * info.head_bytes;
  return (head + 63) / 64 * 64 + cols / info.block * info.packed_bytes;
}

WeightView make_packed(QType type, const uint8_t* data, int64_t rows, int64_t cols) {
  const FormatInfo& info = checked_info(type, rows, cols);
  return {type, data, rows, cols, bytes_of_row(info, cols), packed_tile_bytes(type, cols)};
}

WeightView make_view(QType type, const uint8_t* data, int64_t rows, int64_t cols, Layout layout) {
  if (layout == Layout::Rows) return make_weight(type, data, rows, cols);
  WeightView view = make_packed(type, data, rows, cols);
  view.wants_bf16 = layout == Layout::TilesBf16;
  return view;
}

bool uses_bf16(const KernelTable& kernels, QType type, Layout layout, int64_t cols, bool is_many) {
  if (layout == Layout::Rows || is_grouped(type)) return false;  // of groups, only the exact products are known
  if (kernels.bf16_tiles == nullptr) {
    if (type == QType::BF16)
      throw std::invalid_argument(std::string("packed BF16 weights cannot be computed with on the tier ") +
                                  kernels.name + ", which has no products of bf16");
    return false;
  }
  return type == QType::BF16 || (layout == Layout::TilesBf16 && is_many && cols % kBf16Cols == 0);
}

namespace {

constexpr int64_t kPackTask =
    256 << 10;  // bytes that a task reads: enough to pay for a system call, and a cache holds it
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kAloneOnPages = 4 * kHugePage;  // bytes of output per thread from which on few pages have two writers

std::atomic<int64_t> g_read_ns{0}, g_pack_ns{0};

// Calls task(matrix, first row, rows, their bytes) for groups of tiles of `count` equal matrices in rows of
// `row_bytes`, which begin at start(matrix). A node's tasks are neighbours, and so is what a thread writes, matrices
// being side by side: the thread that writes a page first decides on which node it lies, and threads that meet in a
// huge page that is not there yet would each take one and clear it. Rows of files are read by the thread that packs
// them, just before.
template <class Start, class Task>
void for_tiles(WorkerPool::Session& session, int64_t count, int64_t rows, int64_t row_bytes, const Start& start,
               const Task& task) {
  const int64_t tile_bytes = std::max<int64_t>(kTileRows * row_bytes, 1),
                group = std::max<int64_t>(1, kPackTask / tile_bytes);
  const TileTasks tasks((rows + kTileRows - 1) / kTileRows, group, count, session.num_nodes());
  uint8_t* room = session.scratch<uint8_t>(session.num_threads() * group * tile_bytes);
  session.run_on_nodes(tasks.ends, [&](int64_t i, int thread) {
    const TileTasks::Task at = tasks.at(i);
    const int64_t first = at.tile * kTileRows, some = std::min<int64_t>(at.count * kTileRows, rows - first),
                  began = steady_ns();
    const uint8_t* data =
        read_once(start(at.chunk) + first * row_bytes, some * row_bytes, room + thread * group * tile_bytes);
    const int64_t is_read = steady_ns();
    task(at.chunk, first, some, data);
    g_read_ns.fetch_add(is_read - began, std::memory_order_relaxed);
    g_pack_ns.fetch_add(steady_ns() - is_read, std::memory_order_relaxed);
  });
}

// Has the pages of `bytes` that are written soon brought in by one thread each, where threads would meet in them.
void touch_pages(WorkerPool::Session& session, uint8_t* out, int64_t bytes) {
  if (session.num_nodes() > 1 || session.num_threads() == 1 || bytes >= kAloneOnPages * session.num_threads()) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out), first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const int64_t pages = (static_cast<int64_t>(begin - first) + bytes) / kHugePage;  // whole ones; others are small
  if (pages > 0)
    session.run(pages, [&](int64_t i) {
      *reinterpret_cast<volatile uint8_t*>(first + static_cast<uintptr_t>(i * kHugePage)) = 0;
    });
}

}  // namespace

PackTimes pack_times() { return {g_read_ns.load(), g_pack_ns.load()}; }

void pack_rows(const KernelTable& kernels, const WeightView& some, uint8_t* out) {
  const int64_t tile_bytes = packed_tile_bytes(some.type, some.cols);
  const uint8_t* pointers[kTileRows];
  for (int64_t row = 0; row < some.rows; row += kTileRows, out += tile_bytes) {
    point_rows(some, row, pointers);
    kernels.pack_tile(some.type, pointers, some.cols, out);
  }
}

void pack(WorkerPool& pool, const WeightView& like, const uint8_t* const* weights, int64_t count, uint8_t* out) {
  const int64_t tile_bytes = packed_tile_bytes(like.type, like.cols), tiles = (like.rows + kTileRows - 1) / kTileRows;
  WorkerPool::Session session(pool);
  touch_pages(session, out, count * tiles * tile_bytes);
  for_tiles(
      session, count, like.rows, like.row_bytes, [&](int64_t matrix) { return weights[matrix]; },
      [&](int64_t matrix, int64_t first, int64_t rows, const uint8_t* data) {
        WeightView some = like;
        some.data = data;
        some.rows = rows;
        pack_rows(session.kernels(), some, out + (matrix * tiles + first / kTileRows) * tile_bytes);
      });
}

void pack_fp8(WorkerPool& pool, const Fp8View* weights, int64_t count, int64_t rows, int64_t cols, uint8_t* out) {
  const WeightView like = make_packed(QType::F8_E4M3, nullptr, rows, cols);  // rows of bytes, here not packed yet
  const int64_t blocks = (cols + kFp8Block - 1) / kFp8Block, tiles = (rows + kTileRows - 1) / kTileRows;
  WorkerPool::Session session(pool);
  touch_pages(session, out, count * tiles * like.tile_bytes);
  for_tiles(
      session, count, rows, cols, [&](int64_t matrix) { return weights[matrix].codes; },
      [&](int64_t matrix, int64_t first, int64_t num_rows, const uint8_t* data) {
        WeightView some = like;
        some.data = data;
        some.rows = num_rows;
        const uint8_t* pointers[kTileRows];
        for (int64_t row = 0; row < num_rows; row += kTileRows) {
          point_rows(some, row, pointers);
          session.kernels().pack_fp8_tile(pointers, weights[matrix].scales + (first + row) / kFp8Block * blocks, cols,
                                          out + (matrix * tiles + (first + row) / kTileRows) * like.tile_bytes);
        }
      });
}

void copy_parts(WorkerPool& pool, const Bytes* parts, int64_t count, uint8_t* out) {
  struct Piece {
    const uint8_t* data;
    int64_t bytes, at;
  };
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (int64_t part = 0; part < count; ++part)
    for (int64_t first = 0; first < parts[part].bytes; first += kPackTask) {
      const int64_t bytes = std::min(kPackTask, parts[part].bytes - first);
      pieces.push_back({parts[part].data + first, bytes, at});
      at += bytes;
    }
  WorkerPool::Session session(pool);
  session.run(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    const int64_t began = steady_ns();
    if (read_once(piece.data, piece.bytes, out + piece.at) == piece.data)
      std::memcpy(out + piece.at, piece.data, static_cast<size_t>(piece.bytes));
    g_read_ns.fetch_add(steady_ns() - began, std::memory_order_relaxed);
  });
}

void point_tile(const WeightView& weight, int64_t first, TileArgs& args) {
  args.packed = weight.tile_bytes == 0 ? nullptr : weight.data + first / kTileRows * weight.tile_bytes;
  if (args.packed == nullptr) point_rows(weight, first, args.rows);
}

}  // namespace kt
