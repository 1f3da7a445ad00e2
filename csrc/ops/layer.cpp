// See layer.h.
#include "ops/layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

constexpr int64_t kRowsPerTask = 8;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

float* at_least(std::vector<float>& buffer, int64_t count) {
  if (buffer.size() < static_cast<size_t>(count)) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

// Calls task(row) for every row, several rows to a task.
template <class Task> void for_rows(WorkerPool& pool, int64_t rows, const Task& task) {
  WorkerPool::Session session(pool);
  session.run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t i) {
    for (int64_t r = i * kRowsPerTask; r < std::min(rows, (i + 1) * kRowsPerTask); ++r) task(r, session.kernels());
  });
}

void add_rows(WorkerPool& pool, float* x, const float* y, int64_t rows, int64_t cols) {
  for_rows(pool, rows, [&](int64_t r, const KernelTable& kernels) { kernels.add_row(x + r * cols, y + r * cols, cols); });
}

// What choosing the experts of a row needs, for one thread.
struct RouteMemory {
  static int64_t bytes(int64_t experts) { return experts * static_cast<int64_t>(3 * sizeof(float) + 2); }
  RouteMemory(char* p, int64_t experts)
      : scores(reinterpret_cast<float*>(p)), choice(scores + experts), best(choice + experts),
        is_taken(reinterpret_cast<bool*>(best + experts)), is_kept(is_taken + experts) {}

  float *scores, *choice;
  float* best;  // of each group; there are no more groups than experts
  bool *is_taken, *is_kept;
};

// Sets the scores of all groups but the best to the lowest.
void keep_groups(const RouterSpec& spec, int64_t experts, const RouteMemory& m) {
  const int64_t size = experts / spec.num_groups;
  for (int64_t g = 0; g < spec.num_groups; ++g) {
    float first = kLowest, second = kLowest;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (m.choice[e] > first) {
        second = first;
        first = m.choice[e];
      } else if (m.choice[e] > second) {
        second = m.choice[e];
      }
    }
    m.best[g] = spec.is_top2 ? first + second : first;
  }
  std::fill_n(m.is_kept, spec.num_groups, false);
  for (int64_t n = 0; n < spec.topk_groups; ++n) {
    int64_t chosen = spec.num_groups;
    for (int64_t g = 0; g < spec.num_groups; ++g)
      if (!m.is_kept[g] && (chosen == spec.num_groups || m.best[g] > m.best[chosen])) chosen = g;
    m.is_kept[chosen] = true;
  }
  for (int64_t e = 0; e < experts; ++e)
    if (!m.is_kept[e / size]) m.choice[e] = kLowest;
}

void route_row(const KernelTable& kernels, const RouterSpec& spec, const float* logits, const float* bias, int64_t experts,
               const RouteMemory& m, int64_t* ids, float* weights) {
  if (spec.is_sigmoid)
    kernels.activate({ActKind::Sigmoid, 0, 0}, nullptr, logits, experts, m.scores);
  else
    kernels.softmax_row(logits, experts, m.scores);
  std::copy_n(m.scores, experts, m.choice);
  if (bias != nullptr) kernels.add_row(m.choice, bias, experts);
  if (spec.num_groups > 1) keep_groups(spec, experts, m);
  std::fill_n(m.is_taken, experts, false);
  float sum = 0;
  for (int64_t k = 0; k < spec.top_k; ++k) {
    int64_t chosen = experts;
    for (int64_t e = 0; e < experts; ++e)
      if (!m.is_taken[e] && (chosen == experts || m.choice[e] > m.choice[chosen])) chosen = e;  // a NaN is chosen last
    m.is_taken[chosen] = true;
    ids[k] = chosen;
    weights[k] = m.scores[chosen];
    sum += weights[k];
  }
  for (int64_t k = 0; k < spec.top_k; ++k) {
    if (spec.is_renormalized) weights[k] /= spec.is_sigmoid ? sum + 1e-20f : sum;  // as DeepSeek-V3 does
    weights[k] *= spec.scaling;
  }
}

void norm_rows(WorkerPool& pool, const NormSpec& norm, const float* x, int64_t rows, int64_t cols, float* out) {
  rms_norm(pool, x, norm.weight, rows, cols, norm.eps, out);
}

// Norms of heads and rotation; keys and values to their slots.
void place_heads(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* q, float* k, const float* v) {
  const int64_t dim = block.head_dim, kv_width = block.num_kv_heads * dim;
  for_rows(pool, step.rows, [&](int64_t row, const KernelTable& kernels) {
    if (step.slots[row] < 0 || step.slots[row] >= step.num_slots)
      throw std::out_of_range("row " + std::to_string(row) + " goes to slot " + std::to_string(step.slots[row]) + " of a cache of " +
                              std::to_string(step.num_slots));
    const float *cos = step.cos + row * block.rotary_dims, *sin = step.sin + row * block.rotary_dims;
    const auto prepare = [&](float* heads, int64_t count, const NormSpec& norm) {
      for (float* head = heads; head < heads + count * dim; head += dim) {
        if (norm.weight != nullptr) kernels.rms_norm_row(head, norm.weight, dim, norm.eps, head);
        kernels.rotate_row(head, cos, sin, block.rotary_dims);
      }
    };
    prepare(q + row * block.num_heads * dim, block.num_heads, block.query);
    prepare(k + row * kv_width, block.num_kv_heads, block.key);
    std::copy_n(k + row * kv_width, kv_width, step.keys + step.slots[row] * kv_width);
    std::copy_n(v + row * kv_width, kv_width, step.values + step.slots[row] * kv_width);
  });
}

}  // namespace

void route(WorkerPool& pool, const RouterSpec& spec, const float* logits, const float* bias, int64_t tokens, int64_t experts,
           int64_t* ids, float* weights) {
  WorkerPool::Session session(pool);
  const int64_t size = (RouteMemory::bytes(experts) + 63) / 64 * 64;
  char* of_threads = session.scratch<char>(session.num_threads() * size);
  session.run((tokens + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t i, int thread) {
    const RouteMemory memory(of_threads + thread * size, experts);
    for (int64_t t = i * kRowsPerTask; t < std::min(tokens, (i + 1) * kRowsPerTask); ++t)
      route_row(session.kernels(), spec, logits + t * experts, bias, experts, memory, ids + t * spec.top_k, weights + t * spec.top_k);
  });
}

void attention_block(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* x, LayerBuffers& buffers) {
  const int64_t rows = step.rows, hidden = block.o.rows, width = block.num_heads * block.head_dim, kv_width = block.num_kv_heads * block.head_dim;
  float* normed = at_least(buffers.a, rows * std::max(hidden, width));
  float* q = at_least(buffers.b, rows * (width + 2 * kv_width));
  float *k = q + rows * width, *v = k + rows * kv_width;
  float* out = at_least(buffers.c, rows * hidden);
  norm_rows(pool, block.input, x, rows, hidden, normed);
  linear_parts(pool, normed, rows, {{block.q, block.q_bias, q}, {block.k, block.k_bias, k}, {block.v, block.v_bias, v}});
  place_heads(pool, block, step, q, k, v);
  AttentionArgs a{};
  a.q = q;
  a.k = step.keys;
  a.v = step.values;
  a.out = normed;  // read by the projections only, which are done
  a.q_row = width;
  a.q_head = a.k_head = a.v_head = block.head_dim;
  a.k_slot = a.v_slot = kv_width;
  a.block_table = step.block_table;
  a.table_stride = step.table_stride;
  a.num_seqs = step.num_seqs;
  a.max_pages = step.max_pages;
  a.page_size = step.page_size;
  a.num_slots = step.num_slots;
  a.seq_ids = step.seq_ids;
  a.kv_lens = step.kv_lens;
  a.num_rows = rows;
  a.num_heads = static_cast<int>(block.num_heads);
  a.num_kv_heads = static_cast<int>(block.num_kv_heads);
  a.dim_k = a.dim_v = static_cast<int>(block.head_dim);
  a.scale = block.scale;
  a.window = block.window;
  attention(pool, a);
  linear(pool, normed, rows, block.o, block.o_bias, out);
  add_rows(pool, x, out, rows, hidden);
}

void moe_block(WorkerPool& pool, const MoeBlock& block, int64_t rows, float* x, int64_t* ids, LayerBuffers& buffers) {
  const SharedExperts& shared = block.shared;
  const int64_t hidden = block.router.cols, experts = block.router.rows, width = shared.exists ? shared.up.rows : 0;
  float* normed = at_least(buffers.a, rows * hidden);
  float* logits = at_least(buffers.b, rows * (experts + 2 * width + 1));
  float *up = logits + rows * experts, *gate = up + rows * width, *scores = gate + rows * width;
  float* out = at_least(buffers.c, rows * hidden);
  float* weights = at_least(buffers.d, rows * block.spec.top_k);
  norm_rows(pool, block.norm, x, rows, hidden, normed);
  const LinearPart router = {block.router, nullptr, logits}, shared_gate = {shared.gate, nullptr, gate},
                   shared_up = {shared.up, nullptr, up}, score = {shared.score, nullptr, scores};
  if (!shared.exists)
    linear_parts(pool, normed, rows, {router});
  else if (!shared.has_score)
    linear_parts(pool, normed, rows, {router, shared_gate, shared_up});
  else
    linear_parts(pool, normed, rows, {router, score, shared_gate, shared_up});
  route(pool, block.spec, logits, block.bias, rows, experts, ids, weights);
  block.experts->forward(pool, normed, rows, ids, weights, block.spec.top_k, out);
  if (shared.exists) {
    activate(pool, shared.act, gate, up, rows * width, up);
    if (shared.has_score) activate(pool, {ActKind::Sigmoid, 0, 0}, nullptr, scores, rows, scores);
    float* second = at_least(buffers.e, rows * hidden);
    linear(pool, up, rows, shared.down, nullptr, second);
    for_rows(pool, rows, [&](int64_t r, const KernelTable& kernels) {
      float* row = second + r * hidden;
      if (shared.has_score)
        for (int64_t i = 0; i < hidden; ++i) row[i] *= scores[r];
      kernels.add_row(out + r * hidden, row, hidden);
    });
  }
  add_rows(pool, x, out, rows, hidden);
}

void mlp_block(WorkerPool& pool, const MlpBlock& block, int64_t rows, float* x, LayerBuffers& buffers) {
  const int64_t hidden = block.up.cols, width = block.up.rows;
  float* normed = at_least(buffers.a, rows * hidden);
  float* up = at_least(buffers.b, 2 * rows * width);
  float *gate = up + rows * width, *out = at_least(buffers.c, rows * hidden);
  norm_rows(pool, block.norm, x, rows, hidden, normed);
  linear_parts(pool, normed, rows, {{block.gate, nullptr, gate}, {block.up, nullptr, up}});
  activate(pool, block.act, gate, up, rows * width, up);
  linear(pool, up, rows, block.down, nullptr, out);
  add_rows(pool, x, out, rows, hidden);
}

}  // namespace kt
