// Multi-head latent attention as part of a decoder layer, with the up-projections absorbed (DeepSeek-V2, arXiv
// 2405.04434).
#pragma once
#include "ops/layer/layer.h"

namespace kt {

// Of H heads: a query has `nope` dimensions that are not rotated and `rope` that are, the cache per position the
// normalized latent (`rank`) and the rotated key that heads share (`rope`), a value `v_dim` dimensions.
struct LatentBlock {
  NormSpec input;
  bool has_compression;        // q reads norm(q_a(rows)), else the rows
  WeightView q_a, q, kv_a, o;  // q: [H (nope + rope), ...], kv_a: [rank + rope, hidden]
  const float *q_a_bias, *q_bias, *kv_a_bias, *o_bias;
  NormSpec query, latent, shared;  // of q_a's result, of the latent, of the shared key
  WeightView k_b, v_b;             // H matrices [rank, nope] and [v_dim, rank], one below the other
  int64_t num_heads, rank, nope, rope, v_dim;
  float scale, latent_scale;
  bool is_interleaved;  // pairs are neighbours, else half of `rope` apart
  int layer = -1;

  int64_t head_dim() const { return nope + rope; }
  int64_t cached_dim() const { return rank + rope; }
};

// Norm, projections, rotation, cache, attention to latents, projections; adds to the rows. step: cos and sin are
// [rows, rope / 2], keys [slots, rank + rope] with two scales where they are codes; its values are not read.
void latent_block(WorkerPool& pool, const LatentBlock& block, const AttentionStep& step, float* x,
                  LayerBuffers& buffers);

}  // namespace kt
