// See moe_run.h.
#include "ops/experts/moe_run.h"

#include <algorithm>
#include <atomic>
#include <new>

#if defined(KT_X86)
#include <immintrin.h>
#endif

#include "ops/linear/rows.h"
#include "runtime/format_info.h"

namespace kt {
namespace {

TileArgs tile_args(const WeightView& weight, int64_t tile, const ActRows& act, int count, float* acc) {
  TileArgs args{};
  args.type = weight.type;
  point_tile(weight, tile * kTileRows, args);
  args.k = weight.cols;
  args.act = act;
  args.num_tokens = count;
  args.acc = acc;
  return args;
}

void add_bias(float* acc, int count, const float* bias, int64_t lanes) {
  if (bias == nullptr) return;
  for (int t = 0; t < count; ++t)
    for (int64_t r = 0; r < lanes; ++r) acc[t * kTileRows + r] += bias[r];
}

void copy_rows(const float* acc, int count, int64_t lanes, float* out, int64_t ldo) {
  for (int t = 0; t < count; ++t) std::copy(acc + t * kTileRows, acc + t * kTileRows + lanes, out + t * ldo);
}

// The same past the caches, for results that are more than they hold: a line is then not read before it is written.
void stream_rows(const float* acc, int count, float* out, int64_t ldo) {
#if defined(KT_X86)
  for (int t = 0; t < count; ++t)
    for (int r = 0; r < kTileRows; r += 4) _mm_stream_ps(out + t * ldo + r, _mm_load_ps(acc + t * kTileRows + r));
  _mm_sfence();
#else
  copy_rows(acc, count, kTileRows, out, ldo);
#endif
}

const float* bias_at(const ExpertProjection& p, int64_t expert, int64_t row) {
  return p.bias == nullptr ? nullptr : p.bias + expert * p.rows + row;
}

// Whether activations are quantized for weights of `type`.
bool is_quantized(QType type) { return format_info(type).form != ActForm::Float; }

constexpr int64_t kFusedTiles = 16;                  // 256 columns of the intermediate rows: a block of any type
constexpr int64_t kStreamBytes = int64_t{16} << 20;  // outputs of this size do not stay in caches

constexpr int64_t kAwaitedBytes = int64_t{64} << 10;  // of weights that a thread asks for before it can use them
constexpr int64_t kMergedTokens = 32;                 // up to here whoever finishes a part of the output combines it

}  // namespace

// How many tasks of each part of a job are left. Who finishes the last one sees what all of them wrote and goes on with
// the part, instead of a job of its own for that: handing a job over costs microseconds.
class Countdown {
 public:
  Countdown(WorkerPool::Session& session, int64_t parts, int64_t tasks) : left_(session.scratch<Line>(parts)) {
    for (int64_t i = 0; i < parts; ++i) new (left_ + i) Line{{tasks}, {false}};
  }
  bool finishes(int64_t part, int64_t tasks) const {
    return left_[part].count.fetch_sub(tasks, std::memory_order_acq_rel) == tasks;
  }
  // What follows from the part is there: for others, who see it with all that was written before.
  void complete(int64_t part) const { left_[part].is_complete.store(true, std::memory_order_release); }
  bool is_complete(int64_t part) const { return left_[part].is_complete.load(std::memory_order_acquire); }

 private:
  // A line of its own, so that threads at different parts do not take it from one another.
  struct alignas(64) Line {
    std::atomic<int64_t> count;
    std::atomic<bool> is_complete;
  };
  Line* left_;
};

MoeRun::MoeRun(WorkerPool::Session& session, const ExpertMatrices& matrices, const ActSpec& act,
               const SortedPairs& sorted, const float* x, const Combining& combining)
    : session_(session),
      kernels_(session.kernels()),
      gate_(matrices.gate),
      up_(matrices.up),
      down_(matrices.down),
      act_(act),
      sorted_(sorted),
      wave_(sorted),
      combining_(combining),
      has_gate_(gate_.exists()),
      is_grouped_(!sorted.groups.empty() && pairs() >= kGroupedTokens * sorted.groups.count),
      is_many_(combining.tokens >= kManyTokens && pairs() >= kManyPairs * sorted.groups.count),
      inputs_(session, x, combining.tokens, up_.cols, up_.cols) {}

void MoeRun::run() {
  is_merged_ = combining_.tokens <= kMergedTokens && !is_grouped_ && sorted_.chunks > 0;
  compute();
  if (!is_merged_) combine_all();
}

void MoeRun::run_wave(Span<SortedPairs::Group> groups) {
  wave_.groups = groups;
  wave_.chunks = 0;
  for (SortedPairs::Group& group : groups) {
    group.tasks_before = wave_.chunks;
    wave_.chunks += (group.count + wave_.chunk_size - 1) / wave_.chunk_size;
  }
  compute();
}

void MoeRun::combine_all() {
  const ProfiledOp op(session_, Part::Experts, combining_.tokens, true, kCombine);
  session_.run(combining_.tokens, [&](int64_t t) { combine(t, 0, down_.rows); });
}

void MoeRun::compute() {
  up_input_ = gate_input_ = down_input_ = {};
  if (run_until_down()) return;
  ProfiledOp op(session_, Part::Experts, combining_.tokens, true, kDown);
  if (op.is_on()) op.add_bytes(touched_bytes(down_));
  run_down();
}

float* MoeRun::intermediate() {
  if (intermediate_ == nullptr) intermediate_ = session_.scratch<float>(pairs() * up_.rows);
  return intermediate_;
}

const QuantizedRows& MoeRun::inner_rows() {
  if (inner_.q == nullptr) inner_ = quantized_rows(session_, down_.type, pairs(), up_.rows);
  return inner_;
}

// Sets down_input_. Whether it went on with down.
bool MoeRun::run_until_down() {
  ProfiledOp op(session_, Part::Experts, combining_.tokens, true, kGateUp);
  if (op.is_on()) op.add_bytes(touched_bytes(up_) + touched_bytes(gate_));
  up_input_ = input_of(up_);
  if (has_gate_) gate_input_ = input_of(gate_);
  // Quantizing at once what the down projection reads saves a trip through memory; tasks must not get too few.
  const int64_t fused = wave_.chunks * (up_.rows / (kFusedTiles * kTileRows));
  if (uses_bf16(kernels_, down_.type, down_.layout, down_.cols, is_many_)) {
    run_up_bf16();
  } else if (!is_grouped_ && !wants_blocks()) {
    if (op.is_on()) op.add_bytes_of(Part::Experts, touched_bytes(down_), kDown);
    run_both();
    return true;
  } else if (down_.is_packed() && is_quantized(down_.type) && is_grouped_ && session_.num_nodes() == 1 &&
             fused >= 4 * session_.num_threads()) {
    run_up_fused();
  } else {
    run_up();
  }
  return false;
}

// Whether kernels of down want the rows of an expert side by side, in blocks.
bool MoeRun::wants_blocks() const {
  const int least = kernels_.min_block_tokens, planes = is_quantized(down_.type) ? session_.planes() : 1;
  if (least == 0 || !down_.is_packed() || !is_quantized(down_.type)) return false;
  return std::any_of(wave_.groups.begin(), wave_.groups.end(), [&](const SortedPairs::Group& g) {
    return std::min(g.count, wave_.chunk_size) * planes >= least;
  });
}

// Of up first, then of gate, which may share it.
MoeRun::Input MoeRun::input_of(const ExpertProjection& p) {
  const bool is_bf16 = uses_bf16(kernels_, p.type, p.layout, p.cols, is_many_);
  if (!is_bf16) inputs_.require(p.type);
  Input made = {is_bf16, is_bf16 ? 1 : inputs_.planes_of(p.type), inputs_.form_of(p.type), {}};
  const bool is_same = up_input_.is_bf16 == is_bf16 && (is_bf16 || up_input_.rows.q == made.rows.q);
  const auto groups = [&] { return token_groups(session_, wave_, true, made.planes); };
  if (is_same && !up_input_.blocks.empty()) {
    made.blocks = up_input_.blocks;
  } else if (is_bf16) {
    const Span<TokenGroup> tokens = groups();
    made.blocks = bf16_room(session_, p.cols, tokens);
    round_blocks(session_, inputs_.float_rows().x, inputs_.float_rows().ldx, p.cols, tokens, made.blocks);
  } else if (p.is_packed()) {
    made.blocks = make_blocks(session_, made.rows, p.type, p.cols, groups());
  }
  return made;
}

// Tiles tile .. tile + count - 1 of up and gate for a chunk, activated: acc[j], 16 columns of each token.
void MoeRun::up_tiles(const PairChunk& c, int64_t chunk, int64_t tile, int count,
                      float (*acc)[kPairChunk * kTileRows]) const {
  TileArgs args[kTileGroup] = {};
  for (int j = 0; j < count; ++j) {
    args[j] = input_args(up_, up_input_, c, chunk, tile + j, acc[j]);
    if (has_gate_) args[count + j] = input_args(gate_, gate_input_, c, chunk, tile + j, acc[count + j]);
  }
  run_tiles(kernels_, args, has_gate_ ? 2 * count : count);
  for (int j = 0; j < count; ++j) {
    const int64_t first = (tile + j) * kTileRows, lanes = std::min<int64_t>(kTileRows, up_.rows - first);
    float *up = acc[j], *gate = has_gate_ ? acc[count + j] : nullptr;
    add_planes(up, c.count, up_input_.planes);
    if (has_gate_) add_planes(gate, c.count, gate_input_.planes);
    add_bias(up, c.count, bias_at(up_, c.expert, first), lanes);
    if (has_gate_) add_bias(gate, c.count, bias_at(gate_, c.expert, first), lanes);
    kernels_.activate(act_, gate, up, static_cast<int64_t>(c.count) * kTileRows, up);
  }
}

// One tile of up or gate for the tokens of a chunk.
TileArgs MoeRun::input_args(const ExpertProjection& p, const Input& input, const PairChunk& c, int64_t chunk,
                            int64_t tile, float* acc) const {
  TileArgs args = tile_args(p.view(c.expert), tile, input.rows, c.count * input.planes, acc);
  args.token_ids = input_rows(wave_, c.first, input.planes);
  input.point(args, chunk);
  return args;
}

// Tiles of up and gate for the pairs of a chunk, activated, into their rows of intermediate().
void MoeRun::run_up_task(const TileTasks::Task& task, const PairChunk& c) const {
  alignas(64) float acc[kTileGroup][kPairChunk * kTileRows];
  up_tiles(c, task.chunk, task.tile, task.count, acc);
  for (int j = 0; j < task.count; ++j) {
    const int64_t first = (task.tile + j) * kTileRows, lanes = std::min<int64_t>(kTileRows, up_.rows - first);
    copy_rows(acc[j], c.count, lanes, intermediate_ + c.first * up_.rows + first, up_.rows);
  }
}

void MoeRun::run_up() {
  const int64_t width = up_.rows;
  const float* rows = intermediate();
  const TileTasks tasks((width + kTileRows - 1) / kTileRows, is_grouped_ ? kTileGroup / 2 : 1, wave_.chunks,
                        session_.num_nodes());
  session_.run_on_nodes(tasks.ends, [&](int64_t i) {
    const TileTasks::Task task = tasks.at(i);
    run_up_task(task, chunk_at(wave_, task.chunk));
  });
  if (is_quantized(down_.type)) {
    const QuantizedRows& inner = inner_rows();
    const Span<int32_t> some = wave_pairs();
    for_rows(session_, some.empty() ? pairs() : some.count, rows_per_task(width), [&](int64_t i) {
      const int64_t pair = some.empty() ? i : some[i];
      inner.quantize(kernels_, rows + pair * width, pair, 0, width);
    });
  }
  take_down_rows();
}

// The wave's pairs; empty: they are all of the call.
Span<int32_t> MoeRun::wave_pairs() {
  if (wave_.groups.count == sorted_.groups.count) return {};
  Span<int32_t> found = session_.span<int32_t>(pairs());
  found.count = 0;
  for (const SortedPairs::Group& group : wave_.groups)
    for (int64_t pair = group.first; pair < group.first + group.count; ++pair)
      found.data[found.count++] = static_cast<int32_t>(pair);
  return found;
}

// All of the layer in one job, see above.
void MoeRun::run_both() {
  const int64_t width = up_.rows;
  const bool has_codes = is_quantized(down_.type);
  const float* inner = intermediate();
  const QuantizedRows rows = has_codes ? inner_rows() : QuantizedRows{};
  point_down();
  const TileTasks ups((width + kTileRows - 1) / kTileRows, 1, wave_.chunks, session_.num_nodes());
  const TileTasks downs = down_tasks();
  const Countdown left(session_, wave_.chunks, ups.tiles), columns(session_, downs.tiles, wave_.chunks);
  const auto up = [&](int64_t i) {
    const TileTasks::Task task = ups.at(i);
    const PairChunk c = chunk_at(wave_, task.chunk);
    run_up_task(task, c);
    if (!left.finishes(task.chunk, task.count)) return;
    for (int64_t pair = c.first; has_codes && pair < c.first + c.count; ++pair)
      rows.quantize(kernels_, inner + pair * width, pair, 0, width);
    left.complete(task.chunk);
  };
  const auto down = [&](int64_t i) {
    const TileTasks::Task task = downs.at(i);
    if (await_rows(task, left)) run_down_task(task, columns);
  };
  session_.run_both(ups.ends, up, downs.ends, down);
}

// Until the rows of the task's expert are there it asks for the weights of the task and of those behind it, which are
// the thread's next ones: memory has nothing else to do. False: they will not come.
bool MoeRun::await_rows(const TileTasks::Task& task, const Countdown& left) const {
  const auto is_complete = [&] { return left.is_complete(task.chunk); };
  if (is_complete()) return true;
  const WeightView weight = down_.view(chunk_at(wave_, task.chunk).expert);
  const uint8_t *line = weight.data + task.tile * weight.tile_bytes, *end = weight.data + weight_bytes(weight);
  if (weight.tile_bytes != 0)
    for (end = std::min(end, line + kAwaitedBytes); line < end && !is_complete(); line += 64)
      __builtin_prefetch(line, 0, 2);
  return session_.wait_until(is_complete);
}

// What down reads, of intermediate() or inner_rows().
void MoeRun::point_down() {
  const bool has_codes = is_quantized(down_.type);
  down_input_.planes = has_codes ? session_.planes() : 1;
  down_input_.rows =
      has_codes ? inner_.view() : Activations(session_, intermediate_, pairs(), up_.rows, up_.rows).float_rows();
}

void MoeRun::take_down_rows() {
  point_down();
  if (down_.is_packed())
    down_input_.blocks = make_blocks(session_, down_input_.rows, down_.type, down_.cols,
                                     token_groups(session_, wave_, false, down_input_.planes));
}

// Rounds at once what the down projection reads.
void MoeRun::run_up_bf16() {
  down_input_.is_bf16 = true;
  down_input_.blocks = bf16_room(session_, up_.rows, token_groups(session_, wave_, false, 1));
  const TileTasks tasks(up_.rows / kTileRows, is_grouped_ ? kTileGroup / 2 : 1, wave_.chunks, session_.num_nodes());
  session_.run_on_nodes(tasks.ends, [&](int64_t i) {
    alignas(64) float acc[kTileGroup][kPairChunk * kTileRows];
    const TileTasks::Task task = tasks.at(i);
    const PairChunk c = chunk_at(wave_, task.chunk);
    up_tiles(c, task.chunk, task.tile, task.count, acc);
    const TokenBlocks& to = down_input_.blocks[task.chunk];
    for (int j = 0; j < task.count; ++j) {
      const int64_t first = (task.tile + j) * kTileRows;
      uint16_t* out = to.bf16 + first / kBf16Cols * kBf16Cols * to.rows + first % kBf16Cols;
      kernels_.round_bf16(acc[j], kTileRows, c.count, kTileRows, out, kBf16Cols);
    }
  });
}

void MoeRun::run_up_fused() {
  const int64_t width = up_.rows, columns = kFusedTiles * kTileRows, per_chunk = (width + columns - 1) / columns;
  const QuantizedRows& rows = inner_rows();
  session_.run(wave_.chunks * per_chunk, [&](int64_t i) {
    alignas(64) float acc[kTileGroup][kPairChunk * kTileRows], activated[kPairChunk][kFusedTiles * kTileRows];
    const PairChunk c = chunk_at(wave_, i / per_chunk);
    const int64_t first = i % per_chunk * columns, cols = std::min(columns, width - first);
    for (int64_t at = 0; at < cols; at += kTileGroup / 2 * kTileRows) {
      const int count = static_cast<int>(std::min<int64_t>(kTileGroup / 2, (cols - at + kTileRows - 1) / kTileRows));
      up_tiles(c, i / per_chunk, (first + at) / kTileRows, count, acc);
      for (int j = 0; j < count; ++j) copy_rows(acc[j], c.count, kTileRows, activated[0] + at + j * kTileRows, columns);
    }
    for (int t = 0; t < c.count; ++t) rows.quantize(kernels_, activated[t], c.first + t, first, cols);
  });
  take_down_rows();
}

TileTasks MoeRun::down_tasks() {
  const int64_t hidden = down_.rows, tiles = (hidden + kTileRows - 1) / kTileRows;
  if (outputs_ == nullptr) outputs_ = session_.scratch<float>(pairs() * hidden);
  is_streamed_ = pairs() * hidden * static_cast<int64_t>(sizeof(float)) >= kStreamBytes && hidden % kTileRows == 0;
  const int64_t few = few_tiles(make_view(down_.type, nullptr, hidden, down_.cols, down_.layout).tile_bytes,
                                down_input_.is_bf16, tiles * wave_.chunks, session_.num_threads());
  return {tiles, is_grouped_ ? kTileGroup : few, wave_.chunks, session_.num_nodes()};
}

void MoeRun::run_down() {
  const TileTasks tasks = down_tasks();
  const Countdown left(session_, tasks.tiles, wave_.chunks);
  session_.run_on_nodes(tasks.ends, [&](int64_t i) { run_down_task(tasks.at(i), left); });
}

// left: experts that each tile waits for.
void MoeRun::run_down_task(const TileTasks::Task& task, const Countdown& left) const {
  alignas(64) float acc[kTileGroup][kPairChunk * kTileRows];
  const int64_t hidden = down_.rows;
  const PairChunk c = chunk_at(wave_, task.chunk);
  TileArgs args[kTileGroup] = {};
  const int planes = down_input_.planes;
  for (int j = 0; j < task.count; ++j) {
    args[j] = tile_args(down_.view(c.expert), task.tile + j, down_input_.rows, c.count * planes, acc[j]);
    args[j].first_token = c.first * planes;
    down_input_.point(args[j], task.chunk);
  }
  run_tiles(kernels_, args, task.count);
  for (int j = 0; j < task.count; ++j) {
    const int64_t first = (task.tile + j) * kTileRows, lanes = std::min<int64_t>(kTileRows, hidden - first);
    add_planes(acc[j], c.count, planes);
    add_bias(acc[j], c.count, bias_at(down_, c.expert, first), lanes);
    float* to = outputs_ + c.first * hidden + first;
    if (is_streamed_)
      stream_rows(acc[j], c.count, to, hidden);
    else
      copy_rows(acc[j], c.count, lanes, to, hidden);
  }
  if (!is_merged_ || !left.finishes(task.tile, 1)) return;
  const int64_t first = task.tile * kTileRows, cols = std::min<int64_t>(task.count * kTileRows, hidden - first);
  for (int64_t t = 0; t < combining_.tokens; ++t) combine(t, first, cols);
}

// Columns first .. first + cols - 1 of a token's result; every column is a sum of its own.
void MoeRun::combine(int64_t t, int64_t first, int64_t cols) const {
  const int64_t hidden = down_.rows;
  const float* rows[kMaxTopK];
  float row_weights[kMaxTopK];
  int count = 0;
  for (int64_t i = t * combining_.top_k; i < (t + 1) * combining_.top_k; ++i) {
    const int64_t pair = sorted_.pair_of[i];
    if (pair < 0) continue;
    rows[count] = outputs_ + pair * hidden + first;
    row_weights[count++] = combining_.weights[i];
  }
  kernels_.combine_row(rows, row_weights, count, cols, combining_.out + t * hidden + first);
}

}  // namespace kt
