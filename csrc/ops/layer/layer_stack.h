// Decoder layers one after the other in one call: beside the kernels of a step of few rows, what Python takes between
// two layers is seen.
#pragma once
#include <vector>

#include "ops/attention/latent.h"
#include "ops/layer/layer.h"

namespace kt {

// One of the first three, and one of the last two.
struct StackedLayer {
  const AttentionBlock* attention;
  const LatentBlock* latent;
  const DeltaNetBlock* delta_net;
  const MoeBlock* moe;
  const MlpBlock* mlp;
};

// What a layer keeps of sequences: of attention keys and values (of latents in the keys), of a delta net its states.
struct LayerMemory {
  KvType kv_type;
  bool bf16_products;  // see AttentionArgs
  uint8_t *keys, *values;
  float *key_scales, *value_scales;
  int64_t num_slots;
  float *conv, *states;
};

// The step's rows go to that cache, and see what it has.
void keep_in(AttentionStep& step, const LayerMemory& memory);

// x changes as if the layers' blocks were called one by one. step: its cache and slots count are each layer's own.
// recurrent: read by delta nets only.
void layer_stack(WorkerPool& pool, const std::vector<StackedLayer>& layers, const std::vector<LayerMemory>& memories,
                 AttentionStep step, const RecurrentStep& recurrent, float* x, LayerBuffers& buffers);

}  // namespace kt
