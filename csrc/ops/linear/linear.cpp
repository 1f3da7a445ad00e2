// See linear.h.
#include "ops/linear/linear.h"

#include <algorithm>

#include "ops/linear/activations.h"
#include "ops/linear/tiles.h"

namespace kt {
namespace {

constexpr int64_t kTokenChunk = 128;  // rows of a chunk, whose accumulators are 128 * 16 floats, 8 KiB of stack

// Lanes are rows of the weight: turns a tile's accumulators into rows of the output.
void store_tile(const float* acc, int64_t tokens, int64_t lanes, const float* bias, float* out, int64_t ldo) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < lanes; ++r)
      out[t * ldo + r] = bias != nullptr ? acc[t * 16 + r] + bias[r] : acc[t * 16 + r];
}

struct TokenChunks {
  TokenChunks(int64_t tokens, int planes)
      : size(std::min(tokens, kTokenChunk / planes)), count(size > 0 ? (tokens + size - 1) / size : 0) {}
  int64_t size, count;
};

// Tiles of one matrix within a job over several.
struct PartTasks {
  const LinearPart* part;
  bool is_bf16;
  int planes;
  int64_t row_tiles, group, groups;
  int64_t tasks_before;
  Span<TokenBlocks> blocks;
};

// The rows of every chunk, with `planes` for each token.
Span<TokenGroup> grouped_tokens(WorkerPool::Session& session, const TokenChunks& split, int64_t tokens, int planes) {
  const Span<TokenGroup> groups = session.span<TokenGroup>(split.count);
  for (int64_t i = 0; i < split.count; ++i)
    groups[i] = {nullptr, i * split.size * planes,
                 static_cast<int>(std::min(split.size, tokens - i * split.size)) * planes};
  return groups;
}

void add_bytes(ProfiledOp& op, std::initializer_list<LinearPart> parts) {
  for (const LinearPart& part : parts)
    if (part.part == Part::Other)
      op.add_bytes(weight_bytes(part.weight));
    else
      op.add_bytes_of(part.part, weight_bytes(part.weight));
}

}  // namespace

void linear_parts(WorkerPool& pool, const float* x, int64_t tokens, std::initializer_list<LinearPart> parts) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Linear, tokens);
  if (op.is_on()) add_bytes(op, parts);
  Activations act(session, x, tokens, parts.begin()->weight.cols, parts.begin()->weight.cols);
  Span<PartTasks> jobs = {session.scratch<PartTasks>(static_cast<int64_t>(parts.size())), 0};
  const TokenChunks split(tokens, session.planes());
  const int64_t chunk = split.size, chunks = split.count;
  const Span<TokenGroup> token_groups = grouped_tokens(session, split, tokens, 1);
  const Span<TokenGroup> plane_groups = grouped_tokens(session, split, tokens, session.planes());
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
    const int64_t group = chunk < kGroupedTokens
                              ? few_tiles(part.weight.tile_bytes, is_bf16, row_tiles, session.num_threads())
                          : row_tiles * chunks >= enough ? kTileGroup
                                                         : 1;
    const int64_t groups = (row_tiles + group - 1) / group;
    PartTasks& job = jobs[jobs.count++];
    job = {&part, is_bf16, is_bf16 ? 1 : act.planes_of(part.weight.type), row_tiles, group, groups, tasks, {}};
    tasks += groups * chunks;
    if (is_bf16) job.blocks = bf16_blocks;
    if (is_bf16 || part.weight.tile_bytes == 0) continue;
    const ActRows rows = act.form_of(part.weight.type);
    for (const PartTasks& other : jobs)
      if (job.blocks.empty() && !other.is_bf16 && act.form_of(other.part->weight.type).q == rows.q)
        job.blocks = other.blocks;
    if (job.blocks.empty()) job.blocks = make_blocks(session, rows, part.weight.type, part.weight.cols, plane_groups);
  }
  session.run(tasks, [&](int64_t task) {
    alignas(64) float acc[kTileGroup][kTokenChunk * kTileRows];
    int64_t number = jobs.count - 1;
    while (jobs[number].tasks_before > task) --number;
    const PartTasks& job = jobs[number];
    const int64_t i = task - job.tasks_before, tile = i / chunks * job.group, token = i % chunks * chunk;
    const WeightView& weight = job.part->weight;
    const int count = static_cast<int>(std::min(job.group, job.row_tiles - tile));
    const int num_tokens = static_cast<int>(std::min(chunk, tokens - token));
    TileArgs args[kTileGroup] = {};
    for (int j = 0; j < count; ++j) {
      args[j].type = weight.type;
      point_tile(weight, (tile + j) * kTileRows, args[j]);
      args[j].k = weight.cols;
      args[j].act = act.form_of(weight.type);
      args[j].first_token = token * job.planes;
      args[j].num_tokens = num_tokens * job.planes;
      args[j].acc = acc[j];
      if (!job.blocks.empty()) args[j].blocks = &job.blocks[i % chunks];
    }
    run_tiles(session.kernels(), args, count);
    for (int j = 0; j < count; ++j) {
      const int64_t first = (tile + j) * kTileRows;
      add_planes(acc[j], num_tokens, job.planes);
      store_tile(acc[j], num_tokens, std::min<int64_t>(kTileRows, weight.rows - first),
                 job.part->bias != nullptr ? job.part->bias + first : nullptr,
                 job.part->out + token * weight.rows + first, weight.rows);
    }
  });
}

void linear(WorkerPool& pool, const float* x, int64_t tokens, const WeightView& weight, const float* bias, float* out) {
  linear_parts(pool, x, tokens, {{weight, bias, out}});
}

void batched_linear(WorkerPool& pool, const float* x, int64_t tokens, int64_t batch, const WeightView& weight,
                    float* out, Part part) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, part, tokens);
  op.add_bytes(weight_bytes(weight));
  const int64_t rows = weight.rows / std::max<int64_t>(batch, 1), ldo = batch * rows;
  // Row t * batch + b of the activations is token t of matrix b.
  Activations act(session, x, tokens * batch, weight.cols, weight.cols);
  act.require(weight.type);
  const int planes = act.planes_of(weight.type);
  const TokenChunks chunks(tokens, planes);
  const int64_t per_matrix = (rows + kTileRows - 1) / kTileRows * chunks.count;
  session.run(batch * per_matrix, [&](int64_t i) {
    alignas(64) float acc[kTokenChunk * kTileRows];
    int32_t ids[kTokenChunk];
    const int64_t b = i / per_matrix, j = i % per_matrix;
    const int64_t first = j / chunks.count * kTileRows, token = j % chunks.count * chunks.size;
    const WeightView matrix = {
        weight.type, weight.data + b * rows * weight.row_bytes, rows, weight.cols, weight.row_bytes, 0, false};
    TileArgs args{};
    args.type = weight.type;
    point_rows(matrix, first, args.rows);
    args.k = weight.cols;
    args.act = act.form_of(weight.type);
    const int num_tokens = static_cast<int>(std::min(chunks.size, tokens - token));
    args.num_tokens = num_tokens * planes;
    for (int t = 0; t < args.num_tokens; ++t)
      ids[t] = static_cast<int32_t>(((token + t / planes) * batch + b) * planes + t % planes);
    args.token_ids = ids;
    args.acc = acc;
    run_tiles(session.kernels(), &args, 1);
    add_planes(acc, num_tokens, planes);
    store_tile(acc, num_tokens, std::min<int64_t>(kTileRows, rows - first), nullptr,
               out + token * ldo + b * rows + first, ldo);
  });
}

}  // namespace kt
