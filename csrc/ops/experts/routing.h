// From a router's logits to experts and their weights.
#pragma once
#include <cstdint>

#include "runtime/pool.h"

namespace kt {

// How a token's experts follow from the router's logits; kernels/cpu/router.py has the same as a class of Python.
struct RouterSpec {
  int64_t top_k;
  bool is_sigmoid;  // otherwise softmax
  int64_t num_groups, topk_groups;
  bool is_top2;  // a group is as good as its best two experts, otherwise as its best
  bool is_renormalized;
  float scaling;
};

// logits [tokens, experts] -> ids, weights [tokens, top_k]. bias [experts] or nullptr: moves the choice, not the
// weight. Between equal scores the lower index wins.
void route(WorkerPool& pool, const RouterSpec& spec, const float* logits, const float* bias, int64_t tokens,
           int64_t experts, int64_t* ids, float* weights);

}  // namespace kt
