// From a router's logits to experts and their weights.
#pragma once
#include <cstdint>

#include "runtime/named_enum.h"
#include "runtime/pool.h"

namespace kt {

// What makes scores of a row's logits. A new kind also needs a case in score_row (routing.cpp), a member of Python's
// Scoring, and its formula on a GPU (kernels/triton/experts/router.py) and in plain torch
// (operators/recognize/router.py).
#define KT_SCORINGS(KIND)  \
  KIND(Softmax, "SOFTMAX") \
  KIND(Sigmoid, "SIGMOID")
KT_NAMED_ENUM(Scoring, kScoringNames, KT_SCORINGS);

// How a token's experts follow from the router's logits; kernels/cpu/router.py has the same as a class of Python.
struct RouterSpec {
  int64_t top_k;
  Scoring scoring;
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
