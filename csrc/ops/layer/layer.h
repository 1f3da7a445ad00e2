// Parts of a decoder layer in one call each: what a step spends between kernels must not grow with the number of
// layers. Rows are fp32 and contiguous; every result is that of the kernels called one by one.
#pragma once
#include <vector>

#include "ops/experts/moe.h"
#include "ops/recurrent/recurrent.h"
#include "ops/experts/routing.h"

namespace kt {

struct NormSpec {
  const float* weight;  // nullptr: no norm
  float eps;
};

// Norm, projections, rotation, cache, attention, output projection; adds to the rows. has_gate: q is [query, gate] of
// each head, one behind the other, and what a head attends to is multiplied by the sigmoid of its gate.
struct AttentionBlock {
  NormSpec input, query, key;  // query and key: over a head
  WeightView q, k, v, o;
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  int64_t num_heads, num_kv_heads, head_dim, rotary_dims;
  float scale;
  int64_t window;
  bool has_gate;
  int layer = -1;  // of the model, for the profile

  int64_t query_stride() const { return has_gate ? 2 * head_dim : head_dim; }
};

// Where the step's rows go and what they see; cos, sin [rows, rotary_dims].
struct AttentionStep {
  int64_t rows;
  const float *cos, *sin;
  KvType kv_type;
  bool bf16_products;                // see AttentionArgs
  uint8_t *keys, *values;            // [slots, kv heads, head_dim], contiguous
  float *key_scales, *value_scales;  // [slots, kv heads], contiguous; of codes, else nullptr
  const int64_t* slots;              // [rows]
  const int32_t* block_table;
  int64_t num_seqs, max_pages, table_stride, page_size, num_slots;
  const int32_t* seq_ids;
  const int32_t* kv_lens;
};

// Buffers of a model's layers, which take turns.
struct LayerBuffers {
  std::vector<float> a, b, c, d, e;
  std::vector<int64_t> ids;  // experts, where nobody asks for them
};

// A buffer of at least so many numbers.
float* layer_buffer(std::vector<float>& buffer, int64_t count);

// x += y, both [rows, cols].
void add_to_rows(WorkerPool& pool, float* x, const float* y, int64_t rows, int64_t cols);

void attention_block(WorkerPool& pool, const AttentionBlock& block, const AttentionStep& step, float* x,
                     LayerBuffers& buffers);

// Norm, projections, convolution, delta rule, gated norm, output projection; adds to the rows (Gated DeltaNet).
struct DeltaNetBlock {
  NormSpec input;
  // is_interleaved: qkv is [q, k, v, z] of each key head, one behind the other, b is [b, a] of each, z and a are not
  // read.
  bool is_interleaved;
  // is_tiled: o takes the heads of all key heads' first, then of their second, ...: as files of Qwen3.5 have its
  // columns.
  bool is_tiled;
  WeightView qkv, z, b, a, o;
  const float* conv;         // [width, channels], channels: all of q, then k, then v
  const float *rate, *bias;  // [heads], see delta_gates
  NormSpec norm;             // of a head's result, behind it the gate
  ActKind gate;
  int64_t key_heads, heads, dim_k, dim_v;
  int width;
  float l2norm_eps;
  int layer = -1;

  int64_t key_width() const { return key_heads * dim_k; }
  int64_t value_width() const { return heads * dim_v; }
  int64_t channels() const { return 2 * key_width() + value_width(); }
};

// conv [slots, width - 1, channels], states [slots, heads, dim_k, dim_v].
void delta_net_block(WorkerPool& pool, const DeltaNetBlock& block, const RecurrentStep& step, float* conv,
                     float* states, float* x, LayerBuffers& buffers);

// Experts that see every token: down(act(gate) * up), times the sigmoid of score (one row) where there is one.
struct SharedExperts {
  bool exists;
  WeightView gate, up, down;
  ActSpec act;
  bool has_score;
  WeightView score;
};

// Norm, router, routed experts plus shared ones; adds to the rows.
struct MoeBlock {
  NormSpec norm;
  WeightView router;
  const float* bias;
  RouterSpec spec;
  const Moe* experts;
  SharedExperts shared;
  int layer = -1;
};
// ids [rows, top_k] is filled with the experts chosen.
void moe_block(WorkerPool& pool, const MoeBlock& block, int64_t rows, float* x, int64_t* ids, LayerBuffers& buffers);

// Norm, gate and up, activation, down; adds to the rows.
struct MlpBlock {
  NormSpec norm;
  WeightView gate, up, down;
  ActSpec act;
  int layer = -1;
};
void mlp_block(WorkerPool& pool, const MlpBlock& block, int64_t rows, float* x, LayerBuffers& buffers);

}  // namespace kt
