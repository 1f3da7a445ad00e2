// See layer.h.
#include "ops/layer.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace kt {
namespace {

float* at_least(std::vector<float>& buffer, int64_t count) {
  if (buffer.size() < static_cast<size_t>(count)) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

void add_rows(WorkerPool& pool, float* x, const float* y, int64_t rows, int64_t cols) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows, true);
  for_rows(session, rows, kRowsPerTask,
           [&](int64_t r) { session.kernels().add_row(x + r * cols, y + r * cols, cols); });
}

void norm_rows(WorkerPool& pool, const NormSpec& norm, const float* x, int64_t rows, int64_t cols, float* out) {
  rms_norm(pool, x, norm.weight, rows, cols, norm.eps, out);
}

// Norms of heads and rotation; keys and values to their slots.
void place_heads(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* q, float* k,
                 const float* v) {
  const int64_t dim = block.head_dim, kv_width = block.num_kv_heads * dim;
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Attention, step.rows, true);
  const KernelTable& kernels = session.kernels();
  for_rows(session, step.rows, kRowsPerTask, [&](int64_t row) {
    if (step.slots[row] < 0 || step.slots[row] >= step.num_slots)
      throw std::out_of_range("row " + std::to_string(row) + " goes to slot " + std::to_string(step.slots[row]) +
                              " of a cache of " + std::to_string(step.num_slots));
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

void attention_block(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* x,
                     LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const int64_t rows = step.rows, hidden = block.o.rows, width = block.num_heads * block.head_dim,
                kv_width = block.num_kv_heads * block.head_dim;
  float* normed = at_least(buffers.a, rows * std::max(hidden, width));
  float* q = at_least(buffers.b, rows * (width + 2 * kv_width));
  float *k = q + rows * width, *v = k + rows * kv_width;
  float* out = at_least(buffers.c, rows * hidden);
  norm_rows(pool, block.input, x, rows, hidden, normed);
  {
    const ScopedProfile qkv(pool, -1, Part::Linear, kQkv);
    linear_parts(pool, normed, rows,
                 {{block.q, block.q_bias, q}, {block.k, block.k_bias, k}, {block.v, block.v_bias, v}});
  }
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
  {
    const ScopedProfile output(pool, -1, Part::Linear, kOutput);
    linear(pool, normed, rows, block.o, block.o_bias, out);
  }
  add_rows(pool, x, out, rows, hidden);
}

void moe_block(WorkerPool& pool, const MoeBlock& block, int64_t rows, float* x, int64_t* ids, LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const SharedExperts& shared = block.shared;
  const int64_t hidden = block.router.cols, experts = block.router.rows, width = shared.exists ? shared.up.rows : 0;
  float* normed = at_least(buffers.a, rows * hidden);
  float* logits = at_least(buffers.b, rows * (experts + 2 * width + 1));
  float *up = logits + rows * experts, *gate = up + rows * width, *scores = gate + rows * width;
  float* out = at_least(buffers.c, rows * hidden);
  float* weights = at_least(buffers.d, rows * block.spec.top_k);
  norm_rows(pool, block.norm, x, rows, hidden, normed);
  constexpr Part kShared = Part::SharedExperts;
  const LinearPart router = {block.router, nullptr, logits}, shared_gate = {shared.gate, nullptr, gate, kShared},
                   shared_up = {shared.up, nullptr, up, kShared}, score = {shared.score, nullptr, scores, kShared};
  {
    const ScopedProfile choice(pool, -1, Part::Router);
    if (!shared.exists)
      linear_parts(pool, normed, rows, {router});
    else if (!shared.has_score)
      linear_parts(pool, normed, rows, {router, shared_gate, shared_up});
    else
      linear_parts(pool, normed, rows, {router, score, shared_gate, shared_up});
  }
  route(pool, block.spec, logits, block.bias, rows, experts, ids, weights);
  block.experts->forward(pool, normed, rows, ids, weights, block.spec.top_k, out);
  if (shared.exists) {
    const ScopedProfile shared_scope(pool, -1, kShared);
    activate(pool, shared.act, gate, up, rows * width, up, rows);
    if (shared.has_score) activate(pool, {ActKind::Sigmoid, 0, 0}, nullptr, scores, rows, scores, rows);
    float* second = at_least(buffers.e, rows * hidden);
    linear(pool, up, rows, shared.down, nullptr, second);
    WorkerPool::Session session(pool);
    const ProfiledOp op(session, kShared, rows);
    for_rows(session, rows, kRowsPerTask, [&](int64_t r) {
      float* row = second + r * hidden;
      if (shared.has_score)
        for (int64_t i = 0; i < hidden; ++i) row[i] *= scores[r];
      session.kernels().add_row(out + r * hidden, row, hidden);
    });
  }
  add_rows(pool, x, out, rows, hidden);
}

void mlp_block(WorkerPool& pool, const MlpBlock& block, int64_t rows, float* x, LayerBuffers& buffers) {
  const int64_t hidden = block.up.cols, width = block.up.rows;
  float* normed = at_least(buffers.a, rows * hidden);
  float* up = at_least(buffers.b, 2 * rows * width);
  float *gate = up + rows * width, *out = at_least(buffers.c, rows * hidden);
  const ScopedProfile scope(pool, block.layer, Part::Other);
  norm_rows(pool, block.norm, x, rows, hidden, normed);
  {
    const ScopedProfile mlp(pool, -1, Part::Mlp);
    linear_parts(pool, normed, rows, {{block.gate, nullptr, gate}, {block.up, nullptr, up}});
    activate(pool, block.act, gate, up, rows * width, up, rows);
    linear(pool, up, rows, block.down, nullptr, out);
  }
  add_rows(pool, x, out, rows, hidden);
}

}  // namespace kt
