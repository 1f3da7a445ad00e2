// See latent.h.
#include "ops/attention/latent.h"

#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/attention/kv.h"
#include "ops/linear/linear.h"
#include "ops/linear/rows.h"

namespace kt {
namespace {

// Pairs of x rotated, first all first members, then all second ones: the dot product of two such vectors is that of
// two rotated ones.
void rotate_pairs(const float* x, const float* cos, const float* sin, int64_t dims, bool is_interleaved, float* out) {
  const int64_t half = dims / 2, step = is_interleaved ? 2 : 1, apart = is_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + apart];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// What the projections of a row are made to before attention; out: queries [H, rank + rope], of which the rotated part
// is filled, and what of queries is not rotated [H, nope].
struct LatentRows {
  const float *q, *compressed;
  float *queries, *nope, *latents;
};

void place_row(const KernelTable& kernels, const LatentBlock& block, const AttentionStep& step, const LatentRows& rows,
               int64_t row) {
  const int64_t half = block.rope / 2, cached = block.cached_dim(), heads = block.num_heads;
  const float *cos = step.cos + row * half, *sin = step.sin + row * half;
  for (int64_t head = 0; head < heads; ++head) {
    const float* q = rows.q + (row * heads + head) * block.head_dim();
    std::copy_n(q, block.nope, rows.nope + (row * heads + head) * block.nope);
    rotate_pairs(q + block.nope, cos, sin, block.rope, block.is_interleaved,
                 rows.queries + (row * heads + head) * cached + block.rank);
  }
  const float* compressed = rows.compressed + row * cached;
  float* latent = rows.latents + row * (cached + block.rope);
  kernels.rms_norm_row(compressed, block.latent.weight, block.rank, block.latent.eps, latent);
  if (block.latent_scale != 1.0f)
    for (int64_t i = 0; i < block.rank; ++i) latent[i] *= block.latent_scale;
  const float* key = compressed + block.rank;
  if (block.shared.weight != nullptr) {
    kernels.rms_norm_row(key, block.shared.weight, block.rope, block.shared.eps, latent + cached);
    key = latent + cached;
  }
  rotate_pairs(key, cos, sin, block.rope, block.is_interleaved, latent + block.rank);
  const bool has_scales = step.key_scales != nullptr;
  write_kv_row(kernels,
               {step.kv_type, step.keys, cached, cached, step.key_scales, 2, 2, step.num_slots, cached,
                has_scales ? block.rank : 0},
               latent, cached, 1, row, step.slots[row]);
}

AttentionArgs latent_args(const LatentBlock& block, const AttentionStep& step, const float* queries, float* out) {
  const int64_t cached = block.cached_dim();
  AttentionArgs a{};
  a.q = queries;
  a.kv_type = step.kv_type;
  a.k = a.v = step.keys;
  a.out = out;
  a.q_row = block.num_heads * cached;
  a.q_head = a.k_slot = a.k_head = a.v_slot = a.v_head = cached;
  a.k_parts = step.key_scales == nullptr ? 1 : 2;
  a.k_scales = a.v_scales = step.key_scales;
  a.k_scale_slot = a.k_scale_head = a.v_scale_slot = a.v_scale_head = 2;
  a.block_table = step.block_table;
  a.table_stride = step.table_stride;
  a.num_seqs = step.num_seqs;
  a.max_pages = step.max_pages;
  a.page_size = step.page_size;
  a.num_slots = step.num_slots;
  a.seq_ids = step.seq_ids;
  a.kv_lens = step.kv_lens;
  a.num_rows = step.rows;
  a.num_heads = static_cast<int>(block.num_heads);
  a.num_kv_heads = 1;
  a.dim_k = static_cast<int>(cached);
  a.dim_v = static_cast<int>(block.rank);
  a.scale = block.scale;
  return a;
}

// Queries [rows, H, nope + rope] and compressed keys [rows, rank + rope] of normed rows.
void project(WorkerPool& pool, const LatentBlock& block, int64_t rows, float* normed, float* q, float* compressed,
             float* query) {
  const ScopedProfile scope(pool, -1, Part::Linear, kQkv);
  if (!block.has_compression) {
    linear_parts(pool, normed, rows, {{block.q, block.q_bias, q}, {block.kv_a, block.kv_a_bias, compressed}});
    return;
  }
  linear_parts(pool, normed, rows, {{block.q_a, block.q_a_bias, query}, {block.kv_a, block.kv_a_bias, compressed}});
  rms_norm(pool, query, block.query.weight, rows, block.q_a.rows, block.query.eps, query);
  linear(pool, query, rows, block.q, block.q_bias, q);
}

}  // namespace

void latent_block(WorkerPool& pool, const LatentBlock& block, const AttentionStep& step, float* x,
                  LayerBuffers& buffers) {
  const ScopedProfile scope(pool, block.layer, Part::Other);
  const int64_t rows = step.rows, heads = block.num_heads, hidden = block.o.rows, cached = block.cached_dim();
  const int64_t query_width = block.has_compression ? block.q_a.rows : 0;
  float* normed = layer_buffer(buffers.a, rows * std::max(hidden, heads * block.v_dim));
  float* q = layer_buffer(buffers.b, rows * (heads * block.head_dim() + cached + query_width));
  float *compressed = q + rows * heads * block.head_dim(), *query = compressed + rows * cached;
  float* latents = layer_buffer(buffers.c, rows * std::max(hidden, heads * block.rank));
  float* queries = layer_buffer(buffers.d, rows * heads * cached);
  float* nope = layer_buffer(buffers.e, rows * (heads * block.nope + cached + block.rope));
  rms_norm(pool, x, block.input.weight, rows, hidden, block.input.eps, normed);
  project(pool, block, rows, normed, q, compressed, query);
  const LatentRows parts = {q, compressed, queries, nope, nope + rows * heads * block.nope};
  {
    WorkerPool::Session session(pool);
    const ProfiledOp op(session, Part::Attention, rows, true);
    for_rows(session, rows, kRowsPerTask, [&](int64_t row) { place_row(session.kernels(), block, step, parts, row); });
  }
  batched_linear(pool, nope, rows, heads, block.k_b, latents);
  for (int64_t i = 0; i < rows * heads; ++i) std::copy_n(latents + i * block.rank, block.rank, queries + i * cached);
  attention(pool, latent_args(block, step, queries, latents));
  batched_linear(pool, latents, rows, heads, block.v_b, normed);
  float* out = latents;  // read by the projection of values only, which is done
  {
    const ScopedProfile output(pool, -1, Part::Linear, kOutput);
    linear(pool, normed, rows, block.o, block.o_bias, out);
  }
  add_to_rows(pool, x, out, rows, hidden);
}

}  // namespace kt
