// See moe.h. Pairs (token, k) are sorted by expert; a pair keeps its own row of scratch from gate to down, so an output
// never depends on which tokens share its expert.
#include "moe.h"

#include <algorithm>
#include <stdexcept>

namespace kt {
namespace {

constexpr int64_t kPairChunk = 128;
constexpr int64_t kScratchFloats = int64_t{48} << 20;  // of intermediate and output rows held at once

// Pairs of one chunk of tokens, sorted by expert, in token order within an expert.
struct Routing {
  std::vector<int32_t> token;    // [pairs] row of the input
  std::vector<int64_t> pair_of;  // [tokens * top_k] position in `token`, or -1
  struct Group {
    int64_t expert, first, count;  // pairs first .. first + count - 1
    int64_t tasks_before;          // chunks of all groups before this one
  };
  std::vector<Group> groups;
  int64_t chunks = 0;
};

Routing route(const int64_t* ids, int64_t tokens, int64_t top_k, int64_t num_experts) {
  Routing r;
  std::vector<int64_t> next(static_cast<size_t>(num_experts) + 1, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] < num_experts) ++next[static_cast<size_t>(ids[i]) + 1];
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = next[static_cast<size_t>(e) + 1], first = next[static_cast<size_t>(e)];
    next[static_cast<size_t>(e) + 1] = first + count;
    if (count == 0) continue;
    r.groups.push_back({e, first, count, r.chunks});
    r.chunks += (count + kPairChunk - 1) / kPairChunk;
  }
  r.token.resize(static_cast<size_t>(next[static_cast<size_t>(num_experts)]));
  r.pair_of.resize(static_cast<size_t>(tokens * top_k));
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    if (ids[i] >= num_experts) {
      r.pair_of[static_cast<size_t>(i)] = -1;
      continue;
    }
    const int64_t pair = next[static_cast<size_t>(ids[i])]++;
    r.pair_of[static_cast<size_t>(i)] = pair;
    r.token[static_cast<size_t>(pair)] = static_cast<int32_t>(i / top_k);
  }
  return r;
}

// Chunk number `i` of all groups: its expert, its first pair and how many there are.
struct PairChunk { int64_t expert, first; int count; };

PairChunk chunk_at(const Routing& r, int64_t i) {
  const auto after = std::upper_bound(r.groups.begin(), r.groups.end(), i,
                                      [](int64_t n, const Routing::Group& g) { return n < g.tasks_before; });
  const Routing::Group& g = *(after - 1);
  const int64_t skip = (i - g.tasks_before) * kPairChunk;
  return {g.expert, g.first + skip, static_cast<int>(std::min(kPairChunk, g.count - skip))};
}

// The tokens of every chunk: rows of the input, or of the pairs.
std::vector<TokenGroup> token_groups(const Routing& r, bool is_input) {
  std::vector<TokenGroup> groups;
  for (int64_t i = 0; i < r.chunks; ++i) {
    const PairChunk c = chunk_at(r, i);
    groups.push_back({is_input ? r.token.data() + c.first : nullptr, c.first, c.count});
  }
  return groups;
}

TileArgs tile_args(const WeightView& weight, int64_t first_row, const Activations& act, int count, float* acc) {
  TileArgs args{};
  args.type = weight.type;
  point_tile(weight, first_row, args);
  args.k = weight.cols;
  args.act = act.form_of(weight.type);
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

const float* bias_at(const ExpertProjection& p, int64_t expert, int64_t row) {
  return p.bias == nullptr ? nullptr : p.bias + expert * p.rows + row;
}

}  // namespace

Moe::Moe(ExpertProjection gate, ExpertProjection up, ExpertProjection down, ActSpec act)
    : gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)), act_(act) {
  const size_t experts = up_.experts.size();
  if (experts == 0 || down_.experts.size() != experts || (!gate_.experts.empty() && gate_.experts.size() != experts))
    throw std::invalid_argument("gate, up and down must have the same number of experts, at least one");
  if (down_.cols != up_.rows || down_.rows != up_.cols || (!gate_.experts.empty() && (gate_.rows != up_.rows || gate_.cols != up_.cols)))
    throw std::invalid_argument("expert shapes must be gate [I, H], up [I, H], down [H, I]");
  for (const ExpertProjection* p : {&gate_, &up_, &down_}) make_weight(p->type, nullptr, p->rows, p->cols);
}

void Moe::forward(WorkerPool& pool, const float* x, int64_t tokens, const int64_t* ids, const float* weights, int64_t top_k,
                  float* out) const {
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] < 0 || ids[i] > num_experts())
      throw std::out_of_range("topk_ids[" + std::to_string(i / top_k) + ", " + std::to_string(i % top_k) + "] is " +
                              std::to_string(ids[i]) + ", but there are " + std::to_string(num_experts()) + " experts");
  const int64_t per_token = std::max<int64_t>(1, top_k * (up_.rows + down_.rows));
  const int64_t chunk = std::max<int64_t>(1, kScratchFloats / per_token);
  for (int64_t t = 0; t < tokens; t += chunk) {
    WorkerPool::Session session(pool);
    forward_chunk(session, x + t * up_.cols, std::min(chunk, tokens - t), ids + t * top_k, weights + t * top_k, top_k,
                  out + t * down_.rows);
  }
}

void Moe::forward_chunk(WorkerPool::Session& session, const float* x, int64_t tokens, const int64_t* ids, const float* weights,
                        int64_t top_k, float* out) const {
  const Routing routing = route(ids, tokens, top_k, num_experts());
  const KernelTable& kernels = session.kernels();
  const int64_t pairs = static_cast<int64_t>(routing.token.size()), width = up_.rows, hidden = down_.rows;
  const bool has_gate = !gate_.experts.empty();
  Activations inputs(session, x, tokens, up_.cols, up_.cols);
  inputs.require(up_.type);
  if (has_gate) inputs.require(gate_.type);
  const std::vector<TokenGroup> up_groups = token_groups(routing, true), down_groups = token_groups(routing, false);
  std::vector<TokenBlocks> blocks[2];  // of up, of gate
  if (up_.is_packed) blocks[0] = make_blocks(session, inputs.form_of(up_.type), up_.type, up_.cols, up_groups);
  const bool is_same_form = has_gate && inputs.form_of(gate_.type).q == inputs.form_of(up_.type).q;
  if (has_gate && gate_.is_packed && !is_same_form)
    blocks[1] = make_blocks(session, inputs.form_of(gate_.type), gate_.type, gate_.cols, up_groups);
  float* intermediate = session.scratch<float>(pairs * width);
  const bool is_grouped = !routing.groups.empty() && pairs >= kGroupedTokens * static_cast<int64_t>(routing.groups.size());
  const int64_t width_tiles = (width + kTileRows - 1) / kTileRows, up_group = is_grouped ? kTileGroup / 2 : 1;
  const int64_t up_tasks = (width_tiles + up_group - 1) / up_group;
  session.run(routing.chunks * up_tasks, [&](int64_t i) {
    alignas(64) float acc[kTileGroup][kPairChunk * kTileRows];  // of up, then of gate
    const PairChunk c = chunk_at(routing, i / up_tasks);
    const int64_t tile = i % up_tasks * up_group;
    const int num_tiles = static_cast<int>(std::min(up_group, width_tiles - tile)), parts = has_gate ? 2 : 1;
    const ExpertProjection* projections[2] = {&up_, &gate_};
    TileArgs args[kTileGroup] = {};
    for (int j = 0; j < num_tiles * parts; ++j) {
      args[j] = tile_args(projections[j / num_tiles]->view(c.expert), (tile + j % num_tiles) * kTileRows, inputs, c.count, acc[j]);
      args[j].token_ids = routing.token.data() + c.first;
      const std::vector<TokenBlocks>& mine = blocks[j / num_tiles == 1 && !is_same_form ? 1 : 0];
      if (!mine.empty()) args[j].blocks = &mine[static_cast<size_t>(i / up_tasks)];
    }
    run_tiles(kernels, args, num_tiles * parts);
    for (int j = 0; j < num_tiles; ++j) {
      const int64_t first = (tile + j) * kTileRows, lanes = std::min<int64_t>(kTileRows, width - first);
      float *up = acc[j], *gate = has_gate ? acc[num_tiles + j] : nullptr;
      add_bias(up, c.count, bias_at(up_, c.expert, first), lanes);
      if (has_gate) add_bias(gate, c.count, bias_at(gate_, c.expert, first), lanes);
      kernels.activate(act_, gate, up, static_cast<int64_t>(c.count) * kTileRows, up);
      copy_rows(up, c.count, lanes, intermediate + c.first * width + first, width);
    }
  });
  Activations inner(session, intermediate, pairs, width, width);
  inner.require(down_.type);
  std::vector<TokenBlocks> inner_blocks;
  if (down_.is_packed) inner_blocks = make_blocks(session, inner.form_of(down_.type), down_.type, down_.cols, down_groups);
  float* outputs = session.scratch<float>(pairs * hidden);
  const int64_t hidden_tiles = (hidden + kTileRows - 1) / kTileRows, down_group = is_grouped ? kTileGroup : 1;
  const int64_t down_tasks = (hidden_tiles + down_group - 1) / down_group;
  session.run(routing.chunks * down_tasks, [&](int64_t i) {
    alignas(64) float acc[kTileGroup][kPairChunk * kTileRows];
    const PairChunk c = chunk_at(routing, i / down_tasks);
    const int64_t tile = i % down_tasks * down_group;
    const int num_tiles = static_cast<int>(std::min(down_group, hidden_tiles - tile));
    TileArgs args[kTileGroup] = {};
    for (int j = 0; j < num_tiles; ++j) {
      args[j] = tile_args(down_.view(c.expert), (tile + j) * kTileRows, inner, c.count, acc[j]);
      args[j].first_token = c.first;
      if (!inner_blocks.empty()) args[j].blocks = &inner_blocks[static_cast<size_t>(i / down_tasks)];
    }
    run_tiles(kernels, args, num_tiles);
    for (int j = 0; j < num_tiles; ++j) {
      const int64_t first = (tile + j) * kTileRows, lanes = std::min<int64_t>(kTileRows, hidden - first);
      add_bias(acc[j], c.count, bias_at(down_, c.expert, first), lanes);
      copy_rows(acc[j], c.count, lanes, outputs + c.first * hidden + first, hidden);
    }
  });
  session.run(tokens, [&](int64_t t) {
    std::vector<const float*> rows;
    std::vector<float> row_weights;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t pair = routing.pair_of[static_cast<size_t>(t * top_k + k)];
      if (pair < 0) continue;
      rows.push_back(outputs + pair * hidden);
      row_weights.push_back(weights[t * top_k + k]);
    }
    kernels.combine_row(rows.data(), row_weights.data(), static_cast<int>(rows.size()), hidden, out + t * hidden);
  });
}

}  // namespace kt
