// See layer.h.
#include "ops/layer/layer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "ops/attention/attention.h"
#include "ops/attention/kv.h"
#include "ops/linear/linear.h"
#include "ops/linear/rows.h"

namespace kt {

float* layer_buffer(std::vector<float>& buffer, int64_t count) {
  if (buffer.size() < static_cast<size_t>(count)) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

void add_to_rows(WorkerPool& pool, float* x, const float* y, int64_t rows, int64_t cols) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows, true);
  for_rows(session, rows, kRowsPerTask,
           [&](int64_t r) { session.kernels().add_row(x + r * cols, y + r * cols, cols); });
}

namespace {

void norm_rows(WorkerPool& pool, const NormSpec& norm, const float* x, int64_t rows, int64_t cols, float* out) {
  rms_norm(pool, x, norm.weight, rows, cols, norm.eps, out);
}

// Norms of heads and rotation; keys and values to their slots.
void place_heads(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* q, float* k,
                 const float* v) {
  const int64_t dim = block.head_dim, kv_width = block.num_kv_heads * dim, stride = block.query_stride();
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Attention, step.rows, true);
  const KernelTable& kernels = session.kernels();
  for_rows(session, step.rows, kRowsPerTask, [&](int64_t row) {
    const float *cos = step.cos + row * block.rotary_dims, *sin = step.sin + row * block.rotary_dims;
    const auto prepare = [&](float* heads, int64_t count, int64_t apart, const NormSpec& norm) {
      for (float* head = heads; head < heads + count * apart; head += apart) {
        if (norm.weight != nullptr) kernels.rms_norm_row(head, norm.weight, dim, norm.eps, head);
        kernels.rotate_row(head, cos, sin, block.rotary_dims);
      }
    };
    prepare(q + row * block.num_heads * stride, block.num_heads, stride, block.query);
    prepare(k + row * kv_width, block.num_kv_heads, dim, block.key);
    const int64_t heads = block.num_kv_heads;
    const auto keep = [&](const float* x, uint8_t* data, float* scales) {
      write_kv_row(kernels, {step.kv_type, data, kv_width, dim, scales, heads, 1, step.num_slots, dim, 0}, x, dim,
                   heads, row, step.slots[row]);
    };
    keep(k + row * kv_width, step.keys, step.key_scales);
    keep(v + row * kv_width, step.values, step.value_scales);
  });
}

// x [rows, heads, D] times the sigmoid of the gates, which lie behind the queries.
void gate_heads(WorkerPool& pool, const AttentionBlock& block, const float* q, int64_t rows, float* x) {
  const int64_t dim = block.head_dim, heads = block.num_heads;
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Attention, rows, true);
  for_rows(session, rows, rows_per_task(heads * dim), [&](int64_t r) {
    for (int64_t head = r * heads; head < (r + 1) * heads; ++head) {
      float* result = x + head * dim;
      session.kernels().activate({ActKind::Sigmoid, 0, 0}, q + (2 * head + 1) * dim, result, dim, result);
    }
  });
}

// What the projections of a delta net give, row by row: [rows] times channels, value width, heads (three times each).
struct DeltaRows {
  float *qkv, *z, *mixed, *b, *a, *decay, *beta;

  DeltaRows(const DeltaNetBlock& block, int64_t rows, std::vector<float>& buffer) {
    const int64_t channels = rows * block.channels(), values = rows * block.value_width(), heads = rows * block.heads;
    qkv = layer_buffer(buffer, 2 * channels + values + 4 * heads);
    z = qkv + channels;
    mixed = z + values;
    b = mixed + channels;
    a = b + heads;
    decay = a + heads;
    beta = decay + heads;
  }
};

// One row of interleaved projections, apart as others have them.
void take_apart(const DeltaNetBlock& block, const float* qkvz, const float* ba, int64_t row, const DeltaRows& out) {
  const int64_t share = block.heads / block.key_heads, values = share * block.dim_v;
  float *q = out.qkv + row * block.channels(), *k = q + block.key_width(), *v = k + block.key_width();
  float *z = out.z + row * block.value_width(), *b = out.b + row * block.heads, *a = out.a + row * block.heads;
  for (int64_t head = 0; head < block.key_heads; ++head) {
    q = std::copy_n(qkvz, block.dim_k, q);
    k = std::copy_n(qkvz + block.dim_k, block.dim_k, k);
    v = std::copy_n(qkvz + 2 * block.dim_k, values, v);
    z = std::copy_n(qkvz + 2 * block.dim_k + values, values, z);
    b = std::copy_n(ba, share, b);
    a = std::copy_n(ba + share, share, a);
    qkvz += 2 * (block.dim_k + values);
    ba += 2 * share;
  }
}

void project_delta_net(WorkerPool& pool, const DeltaNetBlock& block, int64_t rows, const float* normed,
                       const DeltaRows& out, std::vector<float>& buffer) {
  const int64_t width = block.channels() + block.value_width(), heads = block.heads;
  float* joined = block.is_interleaved ? layer_buffer(buffer, rows * (width + 2 * heads)) : nullptr;
  {
    const ScopedProfile in(pool, -1, Part::Linear, kQkv);
    if (block.is_interleaved)
      linear_parts(pool, normed, rows, {{block.qkv, nullptr, joined}, {block.b, nullptr, joined + rows * width}});
    else
      linear_parts(pool, normed, rows,
                   {{block.qkv, nullptr, out.qkv},
                    {block.z, nullptr, out.z},
                    {block.b, nullptr, out.b},
                    {block.a, nullptr, out.a}});
  }
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Recurrent, rows, true);
  for_rows(session, rows, 1, [&](int64_t r) {
    if (block.is_interleaved) take_apart(block, joined + r * width, joined + rows * width + r * 2 * heads, r, out);
    session.kernels().delta_gates_row(out.a + r * heads, out.b + r * heads, block.rate, block.bias, heads,
                                      out.decay + r * heads, out.beta + r * heads);
  });
}

// Heads in the order in which o takes them, see DeltaNetBlock::is_tiled.
void tile_heads(WorkerPool& pool, const DeltaNetBlock& block, const float* from, int64_t rows, float* to) {
  const int64_t share = block.heads / block.key_heads, values = block.value_width();
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Recurrent, rows, true);
  for_rows(session, rows, 1, [&](int64_t r) {
    for (int64_t head = 0; head < block.heads; ++head) {
      const int64_t at = head % share * block.key_heads + head / share;
      std::copy_n(from + r * values + head * block.dim_v, block.dim_v, to + r * values + at * block.dim_v);
    }
  });
}

}  // namespace

void delta_net_block(WorkerPool& pool, const DeltaNetBlock& block, const RecurrentStep& step, float* conv,
                     float* states, float* x, LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const int64_t rows = step.num_rows, hidden = block.o.rows, values = block.value_width(), channels = block.channels();
  float* normed = layer_buffer(buffers.a, rows * std::max(hidden, values));
  float* out = layer_buffer(buffers.c, rows * hidden);
  const DeltaRows r(block, rows, buffers.b);
  norm_rows(pool, block.input, x, rows, hidden, normed);
  project_delta_net(pool, block, rows, normed, r, buffers.d);
  ConvArgs c{};
  c.x = r.qkv;
  c.ldx = c.channels = c.weight_tap = channels;
  c.weight = block.conv;
  c.weight_channel = 1;
  c.out = r.mixed;
  c.states = conv;
  c.width = block.width;
  c.is_silu = true;
  causal_conv(pool, step, c);
  ScanArgs s{};
  s.q = r.mixed;
  s.k = s.q + block.key_width();
  s.v = s.k + block.key_width();
  s.q_row = s.k_row = s.v_row = channels;
  s.decay = r.decay;
  s.beta = r.beta;
  s.decay_row = s.beta_row = s.heads = block.heads;
  s.out = normed;  // read by the projections only, which are done
  s.states = states;
  s.key_heads = block.key_heads;
  s.dim_k = block.dim_k;
  s.dim_v = block.dim_v;
  s.has_norm = true;
  s.norm_eps = block.l2norm_eps;
  s.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block.dim_k)));
  delta_scan(pool, step, s);
  gated_norm(pool, {{block.norm.eps, false, block.gate},
                    normed,
                    r.z,
                    block.norm.weight,
                    rows,
                    block.heads,
                    block.dim_v,
                    values,
                    block.dim_v,
                    0,
                    block.is_tiled ? r.mixed : normed});
  if (block.is_tiled) tile_heads(pool, block, r.mixed, rows, normed);
  {
    const ScopedProfile output(pool, -1, Part::Linear, kOutput);
    linear(pool, normed, rows, block.o, nullptr, out);
  }
  add_to_rows(pool, x, out, rows, hidden);
}

void attention_block(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* x,
                     LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const int64_t rows = step.rows, hidden = block.o.rows, width = block.num_heads * block.head_dim,
                q_width = block.num_heads * block.query_stride(), kv_width = block.num_kv_heads * block.head_dim;
  float* normed = layer_buffer(buffers.a, rows * std::max(hidden, width));
  float* q = layer_buffer(buffers.b, rows * (q_width + 2 * kv_width));
  float *k = q + rows * q_width, *v = k + rows * kv_width;
  float* out = layer_buffer(buffers.c, rows * hidden);
  norm_rows(pool, block.input, x, rows, hidden, normed);
  {
    const ScopedProfile qkv(pool, -1, Part::Linear, kQkv);
    linear_parts(pool, normed, rows,
                 {{block.q, block.q_bias, q}, {block.k, block.k_bias, k}, {block.v, block.v_bias, v}});
  }
  place_heads(pool, block, step, q, k, v);
  AttentionArgs a{};
  a.q = q;
  a.kv_type = step.kv_type;
  a.bf16_products = step.bf16_products;
  a.k_parts = 1;
  a.k_scales = step.key_scales;
  a.v_scales = step.value_scales;
  a.k_scale_slot = a.v_scale_slot = block.num_kv_heads;
  a.k_scale_head = a.v_scale_head = 1;
  a.k = step.keys;
  a.v = step.values;
  a.out = normed;  // read by the projections only, which are done
  a.q_row = q_width;
  a.q_head = block.query_stride();
  a.k_head = a.v_head = block.head_dim;
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
  if (block.has_gate) gate_heads(pool, block, q, rows, normed);
  {
    const ScopedProfile output(pool, -1, Part::Linear, kOutput);
    linear(pool, normed, rows, block.o, block.o_bias, out);
  }
  add_to_rows(pool, x, out, rows, hidden);
}

void moe_block(WorkerPool& pool, const MoeBlock& block, int64_t rows, float* x, int64_t* ids, LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const SharedExperts& shared = block.shared;
  const int64_t hidden = block.router.cols, experts = block.router.rows, width = shared.exists ? shared.up.rows : 0;
  float* normed = layer_buffer(buffers.a, rows * hidden);
  float* logits = layer_buffer(buffers.b, rows * (experts + 2 * width + 1));
  float *up = logits + rows * experts, *gate = up + rows * width, *scores = gate + rows * width;
  float* out = layer_buffer(buffers.c, rows * hidden);
  float* weights = layer_buffer(buffers.d, rows * block.spec.top_k);
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
    float* second = layer_buffer(buffers.e, rows * hidden);
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
  add_to_rows(pool, x, out, rows, hidden);
}

void mlp_block(WorkerPool& pool, const MlpBlock& block, int64_t rows, float* x, LayerBuffers& buffers) {
  const int64_t hidden = block.up.cols, width = block.up.rows;
  float* normed = layer_buffer(buffers.a, rows * hidden);
  float* up = layer_buffer(buffers.b, 2 * rows * width);
  float *gate = up + rows * width, *out = layer_buffer(buffers.c, rows * hidden);
  const ScopedProfile scope(pool, block.layer, Part::Other);
  norm_rows(pool, block.norm, x, rows, hidden, normed);
  {
    const ScopedProfile mlp(pool, -1, Part::Mlp);
    linear_parts(pool, normed, rows, {{block.gate, nullptr, gate}, {block.up, nullptr, up}});
    activate(pool, block.act, gate, up, rows * width, up, rows);
    linear(pool, up, rows, block.down, nullptr, out);
  }
  add_to_rows(pool, x, out, rows, hidden);
}

}  // namespace kt
