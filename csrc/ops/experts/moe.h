// The routed experts of one layer: gate, up, activation, down, weighted sum over the chosen experts.
#pragma once
#include <memory>
#include <vector>

#include "ops/experts/expert_counts.h"
#include "ops/experts/moe_run.h"
#include "ops/store/expert_store.h"

namespace kt {

class Moe {
 public:
  // pointers: of gate, up and down for each expert, of the projections that exist; ignored where there is a store,
  // whose layer has the parts gate, up and down, or up and down. Throws std::invalid_argument when they do not fit
  // together. layer: of the model, for the profile; -1: unknown.
  Moe(const ExpertMatrices& matrices, std::vector<const uint8_t*> pointers, ActSpec act, int layer,
      ExpertStore* store = nullptr, int64_t store_layer = 0);

  // out[t] = ((w[t, 0] * y0) + w[t, 1] * y1) + ..., y_k the output of expert ids[t, k], in the order of k.
  // An id equal to the number of experts is skipped; any other id out of range throws std::out_of_range before any
  // work. With a store, waits for experts that are not in memory and throws ReadError for one that cannot be read.
  void forward(WorkerPool& pool, const float* x, int64_t tokens, const int64_t* ids, const float* weights,
               int64_t top_k, float* out) const;

  int64_t hidden_size() const { return matrices_.up.cols; }
  int64_t num_experts() const { return num_experts_; }
  int layer() const { return layer_; }
  const std::shared_ptr<LayerCounts>& counts() const { return counts_; }

 private:
  void forward_chunk(WorkerPool::Session& session, const float* x, const int64_t* ids,
                     const MoeRun::Combining& combining, bool is_first) const;
  void forward_stored(WorkerPool::Session& session, const float* x, const SortedPairs& sorted,
                      const MoeRun::Combining& combining, bool is_first) const;
  ExpertMatrices matrices_;
  const std::vector<const uint8_t*> pointers_;
  const ActSpec act_;
  const int layer_;
  ExpertStore* const store_;
  const int64_t store_layer_, num_experts_;
  std::shared_ptr<LayerCounts> counts_;  // changed within sessions only
};

}  // namespace kt
