// The routed experts of one layer: gate, up, activation, down, weighted sum over the chosen experts.
#pragma once
#include <vector>

#include "ops/experts/expert_counts.h"
#include "ops/weights/weights.h"

namespace kt {

// One projection of all experts: pointers, and an optional bias [experts][rows].
struct ExpertProjection {
  QType type = QType::F32;
  int64_t rows = 0, cols = 0;
  std::vector<const uint8_t*> experts;  // empty: the layer has no such projection
  const float* bias = nullptr;
  Layout layout = Layout::Rows;

  bool is_packed() const { return layout != Layout::Rows; }
  WeightView view(int64_t expert) const {
    return make_view(type, experts[static_cast<size_t>(expert)], rows, cols, layout);
  }
};

class Moe {
 public:
  // gate may be empty. Throws std::invalid_argument when the projections do not fit together.
  // layer: of the model, for the profile; -1: unknown.
  Moe(ExpertProjection gate, ExpertProjection up, ExpertProjection down, ActSpec act, int layer = -1);

  // out[t] = ((w[t, 0] * y0) + w[t, 1] * y1) + ..., y_k the output of expert ids[t, k], in the order of k.
  // An id equal to the number of experts is skipped; any other id out of range throws std::out_of_range before any
  // work.
  void forward(WorkerPool& pool, const float* x, int64_t tokens, const int64_t* ids, const float* weights,
               int64_t top_k, float* out) const;

  int64_t hidden_size() const { return up_.cols; }
  int64_t num_experts() const { return static_cast<int64_t>(up_.experts.size()); }
  int layer() const { return layer_; }
  const std::shared_ptr<LayerCounts>& counts() const { return counts_; }

 private:
  void forward_chunk(WorkerPool::Session& session, const float* x, int64_t tokens, const int64_t* ids,
                     const float* weights, int64_t top_k, float* out) const;
  ExpertProjection gate_, up_, down_;
  ActSpec act_;
  int layer_;
  std::shared_ptr<LayerCounts> counts_;  // changed within sessions only
};

}  // namespace kt
