// See layer_stack.h.
#include "ops/layer/layer_stack.h"

#include <stdexcept>

namespace kt {

void keep_in(AttentionStep& step, const LayerMemory& memory) {
  step.kv_type = memory.kv_type;
  step.bf16_products = memory.bf16_products;
  step.keys = memory.keys;
  step.values = memory.values;
  step.key_scales = memory.key_scales;
  step.value_scales = memory.value_scales;
  step.num_slots = memory.num_slots;
}

void layer_stack(WorkerPool& pool, const std::vector<StackedLayer>& layers, const std::vector<LayerMemory>& memories,
                 AttentionStep step, const RecurrentStep& recurrent, float* x, LayerBuffers& buffers) {
  if (layers.size() != memories.size()) throw std::invalid_argument("each layer needs a memory");
  for (size_t i = 0; i < layers.size(); ++i) {
    const StackedLayer& layer = layers[i];
    const LayerMemory& memory = memories[i];
    if (layer.delta_net == nullptr) {
      keep_in(step, memory);
      if (layer.attention != nullptr)
        attention_block(pool, *layer.attention, step, x, buffers);
      else
        latent_block(pool, *layer.latent, step, x, buffers);
    } else {
      RecurrentStep slots = recurrent;
      slots.num_slots = memory.num_slots;
      delta_net_block(pool, *layer.delta_net, slots, memory.conv, memory.states, x, buffers);
    }
    if (layer.moe != nullptr) {
      const auto count = static_cast<size_t>(step.rows * layer.moe->spec.top_k);
      if (buffers.ids.size() < count) buffers.ids.resize(count);
      moe_block(pool, *layer.moe, step.rows, x, buffers.ids.data(), buffers);
    } else {
      mlp_block(pool, *layer.mlp, step.rows, x, buffers);
    }
  }
}

}  // namespace kt
