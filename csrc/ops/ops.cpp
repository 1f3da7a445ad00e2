// See ops.h.
#include "ops/ops.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "runtime/pages.h"

namespace kt {
namespace {

constexpr int64_t kTokenChunk = 128;     // accumulators of a chunk: 128 * 16 floats, 8 KiB of stack
constexpr int64_t kElementsPerTask = 8192;

ActForm form_for(QType type) { return qtype_info(type).form; }

// Lanes are rows of the weight: turns a tile's accumulators into rows of the output.
void store_tile(const float* acc, int64_t tokens, int64_t lanes, const float* bias, float* out, int64_t ldo) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < lanes; ++r) out[t * ldo + r] = bias != nullptr ? acc[t * 16 + r] + bias[r] : acc[t * 16 + r];
}

const QTypeInfo& checked_info(QType type, int64_t rows, int64_t cols) {
  const QTypeInfo& info = qtype_info(type);
  if (rows < 0 || cols < 0 || cols % info.block != 0)
    throw std::invalid_argument("weight of " + std::to_string(rows) + " rows and " + std::to_string(cols) + " columns cannot be " + info.name);
  return info;
}

}  // namespace

WeightView make_weight(QType type, const uint8_t* data, int64_t rows, int64_t cols) {
  const QTypeInfo& info = checked_info(type, rows, cols);
  if (type == QType::FP8_BLOCK) throw std::invalid_argument("FP8 weights are computed with in re-laid form only");
  return {type, data, rows, cols, cols / info.block * info.bytes};
}

void point_rows(const WeightView& weight, int64_t first, const uint8_t** rows) {
  for (int64_t r = 0; r < kTileRows; ++r) rows[r] = weight.data + std::min(first + r, weight.rows - 1) * weight.row_bytes;
}

int64_t packed_tile_bytes(QType type, int64_t cols) {
  const QTypeInfo& info = qtype_info(type);
  const int64_t blocks = cols / info.block, head = (blocks * 32 + 63) / 64 * 64;
  switch (type) {
    case QType::Q8_0: return head + blocks * 512;
    case QType::Q4_0: return head + blocks * 256;
    case QType::Q4_K: return blocks * 2368;
    case QType::Q5_K: return blocks * 2880;
    case QType::Q6_K: return head + blocks * 3328;
    case QType::IQ4_XS: return head + blocks * 2176;
    case QType::MXFP4: return (blocks * 16 + 63) / 64 * 64 + blocks * 256;
    case QType::BF16:
      if (cols % kBf16Cols != 0) throw std::invalid_argument("BF16 has a re-laid form for multiples of 32 columns only");
      return cols * 2 * kTileRows;
    case QType::FP8_BLOCK: return ((cols + kFp8Block - 1) / kFp8Block * 4 + 63) / 64 * 64 + cols * 16;
    default: throw std::invalid_argument(std::string(info.name) + " has no re-laid form");
  }
}

WeightView make_packed(QType type, const uint8_t* data, int64_t rows, int64_t cols) {
  const QTypeInfo& info = checked_info(type, rows, cols);
  return {type, data, rows, cols, cols / info.block * info.bytes, packed_tile_bytes(type, cols)};
}

WeightView make_view(QType type, const uint8_t* data, int64_t rows, int64_t cols, Layout layout) {
  if (layout == Layout::Rows) return make_weight(type, data, rows, cols);
  WeightView view = make_packed(type, data, rows, cols);
  view.wants_bf16 = layout == Layout::TilesBf16;
  return view;
}

bool uses_bf16(const KernelTable& kernels, QType type, Layout layout, int64_t cols, bool is_many) {
  if (layout == Layout::Rows) return false;
  if (kernels.bf16_tiles == nullptr) {
    if (type == QType::BF16)
      throw std::invalid_argument(std::string("re-laid BF16 weights cannot be computed with on the tier ") + kernels.name + ", which has no products of bf16");
    return false;
  }
  return type == QType::BF16 || (layout == Layout::TilesBf16 && is_many && cols % kBf16Cols == 0);
}

namespace {

constexpr int64_t kPackTask = 512 << 10;  // bytes that a task reads: enough to pay for a system call
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kAloneOnPages = 4 * kHugePage;  // bytes of output per thread from which on few pages have two writers

// Calls task(matrix, first tile, tiles) for groups of tiles of `count` equal matrices. A node's tasks are neighbours, and
// so is what a thread writes, matrices being side by side: the thread that writes a page first decides on which node it
// lies, and threads that meet in a huge page that is not there yet would each take one and clear it.
template <class Task> void for_tiles(WorkerPool::Session& session, int64_t count, int64_t tiles, int64_t read_bytes, const Task& task) {
  const int64_t group = std::max<int64_t>(1, kPackTask / std::max<int64_t>(read_bytes, 1));
  const int nodes = session.num_nodes();
  NodeEnds ends;
  ends.count = nodes;
  const auto first_of = [&](int node) { return tiles * node / nodes; };
  const auto groups_of = [&](int node) { return (first_of(node + 1) - first_of(node) + group - 1) / group; };
  int64_t end = 0;
  for (int n = 0; n < nodes; ++n) ends.ends[static_cast<size_t>(n)] = end += count * groups_of(n);
  session.run_on_nodes(ends, [&](int64_t i) {
    int node = 0;
    while (i >= ends.ends[static_cast<size_t>(node)]) ++node;
    if (node > 0) i -= ends.ends[static_cast<size_t>(node) - 1];
    const int64_t groups = groups_of(node), first = first_of(node) + i % groups * group;
    task(i / groups, first, std::min(group, first_of(node + 1) - first));
  });
}

// Has the pages of `bytes` that are written soon brought in by one thread each, where threads would meet in them.
void touch_pages(WorkerPool::Session& session, uint8_t* out, int64_t bytes) {
  if (session.num_nodes() > 1 || session.num_threads() == 1 || bytes >= kAloneOnPages * session.num_threads()) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out), first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const int64_t pages = (static_cast<int64_t>(begin - first) + bytes) / kHugePage;  // whole ones; others are small
  if (pages > 0) session.run(pages, [&](int64_t i) { *reinterpret_cast<volatile uint8_t*>(first + static_cast<uintptr_t>(i * kHugePage)) = 0; });
}

}  // namespace

void pack(WorkerPool& pool, const WeightView& like, const uint8_t* const* weights, int64_t count, uint8_t* out) {
  const int64_t tile_bytes = packed_tile_bytes(like.type, like.cols), tiles = (like.rows + kTileRows - 1) / kTileRows;
  WorkerPool::Session session(pool);
  touch_pages(session, out, count * tiles * tile_bytes);
  for_tiles(session, count, tiles, kTileRows * like.row_bytes, [&](int64_t matrix, int64_t first, int64_t n) {
    WeightView weight = like;
    weight.data = weights[matrix];
    const int64_t row = first * kTileRows;
    map_pages(weight.data + row * weight.row_bytes, std::min(n * kTileRows, weight.rows - row) * weight.row_bytes);
    const uint8_t* rows[kTileRows];
    for (int64_t tile = first; tile < first + n; ++tile) {
      point_rows(weight, tile * kTileRows, rows);
      session.kernels().pack_tile(weight.type, rows, weight.cols, out + (matrix * tiles + tile) * tile_bytes);
    }
  });
}

void pack_fp8(WorkerPool& pool, const Fp8View* weights, int64_t count, int64_t rows, int64_t cols, uint8_t* out) {
  const WeightView like = make_packed(QType::FP8_BLOCK, nullptr, rows, cols);  // rows of bytes, here not re-laid yet
  const int64_t blocks = (cols + kFp8Block - 1) / kFp8Block, tiles = (rows + kTileRows - 1) / kTileRows;
  WorkerPool::Session session(pool);
  touch_pages(session, out, count * tiles * like.tile_bytes);
  for_tiles(session, count, tiles, kTileRows * cols, [&](int64_t matrix, int64_t first, int64_t n) {
    WeightView view = like;
    view.data = weights[matrix].codes;
    const int64_t row = first * kTileRows;
    map_pages(view.data + row * cols, std::min(n * kTileRows, rows - row) * cols);
    const uint8_t* pointers[kTileRows];
    for (int64_t tile = first; tile < first + n; ++tile) {
      point_rows(view, tile * kTileRows, pointers);
      session.kernels().pack_fp8_tile(pointers, weights[matrix].scales + tile * kTileRows / kFp8Block * blocks, cols,
                                      out + (matrix * tiles + tile) * view.tile_bytes);
    }
  });
}

void point_tile(const WeightView& weight, int64_t first, TileArgs& args) {
  args.packed = weight.tile_bytes == 0 ? nullptr : weight.data + first / kTileRows * weight.tile_bytes;
  if (args.packed == nullptr) point_rows(weight, first, args.rows);
}

namespace {

// Tiles that one call of a kernel may take together have the same.
int kind_of(const TileArgs& args) {
  if (args.packed == nullptr) return 0;
  return args.blocks != nullptr && args.blocks->bf16 != nullptr ? 1 : 2 + static_cast<int>(form_for(args.type));
}

}  // namespace

void run_tiles(const KernelTable& kernels, const TileArgs* args, int count) {
  for (int i = 0; i < count;) {
    const int kind = kind_of(args[i]);
    int same = 1;
    while (kind != 0 && i + same < count && kind_of(args[i + same]) == kind) ++same;
    if (kind == 0)
      kernels.tile(args[i]);
    else
      (kind == 1 ? kernels.bf16_tiles : kernels.packed_tiles)(args + i, same);
    i += same;
  }
}

Activations::Activations(WorkerPool::Session& session, const float* x, int64_t rows, int64_t ldx, int64_t cols)
    : session_(session), x_(x), rows_(rows), cols_(cols) {
  float_.x = x;
  float_.ldx = ldx;
}

void Activations::require(QType type) {
  const ActForm form = form_for(type);
  ActRows* target = form == ActForm::Q32 ? &q32_ : form == ActForm::Q256 ? &q256_ : nullptr;
  if (target != nullptr && target->q == nullptr) quantize(form, *target);
}

ActRows Activations::form_of(QType type) const {
  const ActForm form = form_for(type);
  return form == ActForm::Q32 ? q32_ : form == ActForm::Q256 ? q256_ : float_;
}

void Activations::quantize(ActForm form, ActRows& out) {
  const int64_t block = form == ActForm::Q32 ? 32 : 256, blocks = cols_ / block;
  const int64_t sums_per_block = form == ActForm::Q32 ? 1 : kSumsPerSuper;
  int8_t* q = session_.scratch<int8_t>(rows_ * cols_);
  float* d = session_.scratch<float>(rows_ * blocks);
  int16_t* sums = session_.scratch<int16_t>(rows_ * blocks * sums_per_block);
  const KernelTable& kernels = session_.kernels();
  // Several short rows make one task.
  const int64_t group = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(cols_, 1));
  session_.run((rows_ + group - 1) / group, [&](int64_t i) {
    for (int64_t r = i * group; r < std::min(rows_, (i + 1) * group); ++r)
      kernels.quantize_row(form, x_ + r * float_.ldx, cols_, q + r * cols_, d + r * blocks, sums + r * blocks * sums_per_block);
  });
  out = ActRows{nullptr, 0, q, cols_, d, blocks, sums, blocks * sums_per_block};
}

void QuantizedRows::quantize(const KernelTable& kernels, const float* x, int64_t row, int64_t first, int64_t count) const {
  const int64_t block = form == ActForm::Q32 ? 32 : 256, at = row * (cols / block) + first / block;
  kernels.quantize_row(form, x, count, q + row * cols + first, d + at, sums + at * (form == ActForm::Q32 ? 1 : kSumsPerSuper));
}

ActRows QuantizedRows::view() const {
  const int64_t blocks = cols / (form == ActForm::Q32 ? 32 : 256);
  return {nullptr, 0, q, cols, d, blocks, sums, blocks * (form == ActForm::Q32 ? 1 : kSumsPerSuper)};
}

QuantizedRows quantized_rows(WorkerPool::Session& session, QType type, int64_t rows, int64_t cols) {
  const ActForm form = form_for(type);
  const int64_t blocks = cols / (form == ActForm::Q32 ? 32 : 256);
  return {form, session.scratch<int8_t>(rows * cols), session.scratch<float>(rows * blocks),
          session.scratch<int16_t>(rows * blocks * (form == ActForm::Q32 ? 1 : kSumsPerSuper)), cols};
}

TileTasks::TileTasks(int64_t num_tiles, int64_t group_size, int64_t chunks, int num_nodes)
    : tiles(num_tiles), group(group_size), nodes(num_nodes) {
  ends.count = nodes;
  int64_t end = 0;
  for (int n = 0; n < nodes; ++n) {
    end += chunks * ((first_tile(n + 1) - first_tile(n) + group - 1) / group);
    ends.ends[static_cast<size_t>(n)] = end;
  }
}

TileTasks::Task TileTasks::at(int64_t i) const {
  int node = 0;
  while (i >= ends.ends[static_cast<size_t>(node)]) ++node;
  if (node > 0) i -= ends.ends[static_cast<size_t>(node) - 1];
  const int64_t first = first_tile(node), end = first_tile(node + 1), per_chunk = (end - first + group - 1) / group;
  const int64_t tile = first + i % per_chunk * group;
  return {i / per_chunk, tile, static_cast<int>(std::min(group, end - tile))};
}

namespace {

constexpr int64_t kPiece = 256;  // columns

void copy_piece(const ActRows& act, ActForm form, const TokenGroup& group, int64_t piece, int64_t cols, const TokenBlocks& out) {
  const int64_t width = std::min(kPiece, cols - piece * kPiece), blocks = width / 32;
  for (int64_t t = 0; t < group.count; ++t) {
    const int64_t row = group.ids != nullptr ? group.ids[t] : group.first + t, to = piece * out.rows + t;
    std::memcpy(out.q + to * kPiece, act.q + row * act.ldq + piece * kPiece, static_cast<size_t>(width));
    if (form == ActForm::Q256) {
      std::memcpy(out.sums + to * 8, act.sums + row * act.lds + piece * kSumsPerSuper + 16, 16);
      out.d[to * 8] = act.d[row * act.ldd + piece];
    } else {
      std::memcpy(out.sums + to * 8, act.sums + row * act.lds + piece * 8, static_cast<size_t>(2 * blocks));
      std::memcpy(out.d + to * 8, act.d + row * act.ldd + piece * 8, static_cast<size_t>(4 * blocks));
    }
  }
}

}  // namespace

Span<TokenBlocks> make_blocks(WorkerPool::Session& session, const ActRows& act, QType type, int64_t cols, Span<TokenGroup> groups) {
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
               session.scratch<float>(pieces * rows * 8), rows};
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
      session.kernels().round_bf16(x + row * ldx + first, kBf16Cols, steps, kBf16Cols, out + t * kBf16Cols, to.rows * kBf16Cols);
    }
  });
}

TileSplit split_tiles(int64_t rows, int64_t tokens) {
  const int64_t chunk = std::min(tokens, kTokenChunk);
  return {(rows + kTileRows - 1) / kTileRows, chunk > 0 ? (tokens + chunk - 1) / chunk : 0, chunk};
}

namespace {

// Tiles of one matrix within a job over several.
struct PartTasks {
  const LinearPart* part;
  bool is_bf16;
  int64_t row_tiles, group, groups;
  int64_t tasks_before;
  Span<TokenBlocks> blocks;
};

}  // namespace

void linear_parts(WorkerPool& pool, const float* x, int64_t tokens, std::initializer_list<LinearPart> parts) {
  WorkerPool::Session session(pool);
  Activations act(session, x, tokens, parts.begin()->weight.cols, parts.begin()->weight.cols);
  Span<PartTasks> jobs = {session.scratch<PartTasks>(static_cast<int64_t>(parts.size())), 0};
  const int64_t chunk = std::min(tokens, kTokenChunk), chunks = chunk > 0 ? (tokens + chunk - 1) / chunk : 0;
  const Span<TokenGroup> token_groups = session.span<TokenGroup>(chunks);
  for (int64_t i = 0; i < chunks; ++i) token_groups[i] = {nullptr, i * chunk, static_cast<int>(std::min(chunk, tokens - i * chunk))};
  int64_t tasks = 0;
  Span<TokenBlocks> bf16_blocks;  // parts read the same activations
  for (const LinearPart& part : parts) {
    const bool is_bf16 = uses_bf16(session.kernels(), part.weight, tokens >= kManyTokens);
    if (is_bf16 && bf16_blocks.empty()) {
      bf16_blocks = bf16_room(session, part.weight.cols, token_groups);
      round_blocks(session, x, part.weight.cols, part.weight.cols, token_groups, bf16_blocks);
    }
    if (!is_bf16) act.require(part.weight.type);
    const int64_t row_tiles = (part.weight.rows + kTileRows - 1) / kTileRows;
    // Tiles share the activations that they gather, unless that would leave threads without work.
    const int64_t enough = int64_t{4} * kTileGroup * session.num_threads();
    const int64_t group = chunk >= kGroupedTokens && row_tiles * chunks >= enough ? kTileGroup : 1;
    const int64_t groups = (row_tiles + group - 1) / group;
    PartTasks& job = jobs[jobs.count++];
    job = {&part, is_bf16, row_tiles, group, groups, tasks, {}};
    tasks += groups * chunks;
    if (is_bf16) job.blocks = bf16_blocks;
    if (is_bf16 || part.weight.tile_bytes == 0) continue;
    const ActRows rows = act.form_of(part.weight.type);
    for (const PartTasks& other : jobs)
      if (job.blocks.empty() && !other.is_bf16 && act.form_of(other.part->weight.type).q == rows.q) job.blocks = other.blocks;
    if (job.blocks.empty()) job.blocks = make_blocks(session, rows, part.weight.type, part.weight.cols, token_groups);
  }
  session.run(tasks, [&](int64_t task) {
    alignas(64) float acc[kTileGroup][kTokenChunk * kTileRows];
    int64_t number = jobs.count - 1;
    while (jobs[number].tasks_before > task) --number;
    const PartTasks& job = jobs[number];
    const int64_t i = task - job.tasks_before, tile = i / chunks * job.group, token = i % chunks * chunk;
    const WeightView& weight = job.part->weight;
    const int count = static_cast<int>(std::min(job.group, job.row_tiles - tile));
    TileArgs args[kTileGroup] = {};
    for (int j = 0; j < count; ++j) {
      args[j].type = weight.type;
      point_tile(weight, (tile + j) * kTileRows, args[j]);
      args[j].k = weight.cols;
      args[j].act = act.form_of(weight.type);
      args[j].first_token = token;
      args[j].num_tokens = static_cast<int>(std::min(chunk, tokens - token));
      args[j].acc = acc[j];
      if (!job.blocks.empty()) args[j].blocks = &job.blocks[i % chunks];
    }
    run_tiles(session.kernels(), args, count);
    for (int j = 0; j < count; ++j) {
      const int64_t first = (tile + j) * kTileRows;
      store_tile(acc[j], args[j].num_tokens, std::min<int64_t>(kTileRows, weight.rows - first),
                 job.part->bias != nullptr ? job.part->bias + first : nullptr, job.part->out + token * weight.rows + first, weight.rows);
    }
  });
}

void linear(WorkerPool& pool, const float* x, int64_t tokens, const WeightView& weight, const float* bias, float* out) {
  linear_parts(pool, x, tokens, {{weight, bias, out}});
}

void batched_linear(WorkerPool& pool, const float* x, int64_t tokens, int64_t batch, const WeightView& weight, float* out) {
  WorkerPool::Session session(pool);
  const int64_t rows = weight.rows / std::max<int64_t>(batch, 1), ldo = batch * rows;
  // Row t * batch + b of the activations is token t of matrix b.
  Activations act(session, x, tokens * batch, weight.cols, weight.cols);
  act.require(weight.type);
  const TileSplit split = split_tiles(rows, tokens);
  const int64_t per_matrix = split.row_tiles * split.token_chunks;
  session.run(batch * per_matrix, [&](int64_t i) {
    alignas(64) float acc[kTokenChunk * kTileRows];
    int32_t ids[kTokenChunk];
    const int64_t b = i / per_matrix, j = i % per_matrix;
    const int64_t first = j / split.token_chunks * kTileRows, token = j % split.token_chunks * split.chunk;
    const WeightView matrix = {weight.type, weight.data + b * rows * weight.row_bytes, rows, weight.cols, weight.row_bytes, 0, false};
    TileArgs args{};
    args.type = weight.type;
    point_rows(matrix, first, args.rows);
    args.k = weight.cols;
    args.act = act.form_of(weight.type);
    args.num_tokens = static_cast<int>(std::min(split.chunk, tokens - token));
    for (int t = 0; t < args.num_tokens; ++t) ids[t] = static_cast<int32_t>((token + t) * batch + b);
    args.token_ids = ids;
    args.acc = acc;
    run_tiles(session.kernels(), &args, 1);
    store_tile(acc, args.num_tokens, std::min<int64_t>(kTileRows, rows - first), nullptr, out + token * ldo + b * rows + first, ldo);
  });
}

void dequantize_rows(WorkerPool& pool, const WeightView& weight, const int64_t* ids, int64_t count, float* out) {
  WorkerPool::Session session(pool);
  const int64_t group = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(weight.cols, 1));
  session.run((count + group - 1) / group, [&](int64_t i) {
    for (int64_t j = i * group; j < std::min(count, (i + 1) * group); ++j)
      session.kernels().dequantize_row(weight.type, weight.data + ids[j] * weight.row_bytes, weight.cols, out + j * weight.cols);
  });
}

void rms_norm(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t cols, float eps, float* out) {
  WorkerPool::Session session(pool);
  const int64_t group = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(cols, 1));
  session.run((rows + group - 1) / group, [&](int64_t i) {
    for (int64_t r = i * group; r < std::min(rows, (i + 1) * group); ++r)
      session.kernels().rms_norm_row(x + r * cols, weight, cols, eps, out + r * cols);
  });
}

void activate(WorkerPool& pool, const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out) {
  WorkerPool::Session session(pool);
  session.run((n + kElementsPerTask - 1) / kElementsPerTask, [&](int64_t i) {
    const int64_t first = i * kElementsPerTask;
    session.kernels().activate(spec, gate ? gate + first : nullptr, up + first, std::min(kElementsPerTask, n - first), out + first);
  });
}

double read_bandwidth(WorkerPool& pool, const uint8_t* data, int64_t bytes, int repeats) {
  WorkerPool::Session session(pool);
  constexpr int64_t kPart = int64_t{1} << 20;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const auto begin = std::chrono::steady_clock::now();
    session.run(bytes / kPart, [&](int64_t i) { sink ^= session.kernels().read_lines(data + i * kPart, kPart); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(bytes / kPart * kPart) / took.count());
  }
  return best;
}

namespace {

double register_peak(WorkerPool::Session& session, int64_t (*multiply)(int64_t, int32_t*), int64_t rounds, int repeats) {
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    std::atomic<int64_t> operations{0};
    const auto begin = std::chrono::steady_clock::now();
    session.run(session.num_threads() * 4, [&](int64_t) {
      int32_t out[32];
      operations += multiply(rounds, out);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(operations.load()) / took.count());
  }
  return best;
}

}  // namespace

double int8_peak(WorkerPool& pool, int repeats) {
  WorkerPool::Session session(pool);
  return register_peak(session, session.kernels().multiply_registers, 200000, repeats);
}

double bf16_peak(WorkerPool& pool, int repeats) {
  WorkerPool::Session session(pool);
  return session.kernels().multiply_bf16 == nullptr ? 0 : register_peak(session, session.kernels().multiply_bf16, 20000, repeats);
}

}  // namespace kt
