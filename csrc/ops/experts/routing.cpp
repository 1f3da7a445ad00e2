// See routing.h.
#include "ops/experts/routing.h"

#include <algorithm>
#include <limits>

#include "ops/linear/rows.h"

namespace kt {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// What choosing the experts of a row needs, for one thread.
struct RouteMemory {
  static int64_t bytes(int64_t experts) { return experts * static_cast<int64_t>(3 * sizeof(float) + 2); }
  RouteMemory(char* p, int64_t experts)
      : scores(reinterpret_cast<float*>(p)),
        choice(scores + experts),
        best(choice + experts),
        is_taken(reinterpret_cast<bool*>(best + experts)),
        is_kept(is_taken + experts) {}

  float *scores, *choice;
  float* best;  // of each group; there are no more groups than experts
  bool *is_taken, *is_kept;
};

// Sets the scores of all groups but the best to the lowest.
void keep_groups(const RouterSpec& spec, int64_t experts, const RouteMemory& m) {
  const int64_t size = experts / spec.num_groups;
  for (int64_t g = 0; g < spec.num_groups; ++g) {
    float first = kLowest, second = kLowest;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (m.choice[e] > first) {
        second = first;
        first = m.choice[e];
      } else if (m.choice[e] > second) {
        second = m.choice[e];
      }
    }
    m.best[g] = spec.is_top2 ? first + second : first;
  }
  std::fill_n(m.is_kept, spec.num_groups, false);
  for (int64_t n = 0; n < spec.topk_groups; ++n) {
    int64_t chosen = spec.num_groups;
    for (int64_t g = 0; g < spec.num_groups; ++g)
      if (!m.is_kept[g] && (chosen == spec.num_groups || m.best[g] > m.best[chosen])) chosen = g;
    m.is_kept[chosen] = true;
  }
  for (int64_t e = 0; e < experts; ++e)
    if (!m.is_kept[e / size]) m.choice[e] = kLowest;
}

// Sets the scores of a row. Returns what is added to the sum of those chosen before weights are divided by it: scores
// that have no sum of their own may all be 0. Without `default`: see activation in kernels/common/math.inl.
float score_row(const KernelTable& kernels, Scoring scoring, const float* logits, int64_t experts, float* scores) {
  switch (scoring) {
    case Scoring::Softmax: kernels.softmax_row(logits, experts, scores); return 0;
    case Scoring::Sigmoid:
      kernels.activate({ActKind::Sigmoid, 0, 0}, nullptr, logits, experts, scores);
      return 1e-20f;  // as DeepSeek-V3 does
  }
  __builtin_trap();
}

void route_row(const KernelTable& kernels, const RouterSpec& spec, const float* logits, const float* bias,
               int64_t experts, const RouteMemory& m, int64_t* ids, float* weights) {
  const float least = score_row(kernels, spec.scoring, logits, experts, m.scores);
  std::copy_n(m.scores, experts, m.choice);
  if (bias != nullptr) kernels.add_row(m.choice, bias, experts);
  if (spec.num_groups > 1) keep_groups(spec, experts, m);
  std::fill_n(m.is_taken, experts, false);
  float sum = 0;
  for (int64_t k = 0; k < spec.top_k; ++k) {
    int64_t chosen = experts;
    for (int64_t e = 0; e < experts; ++e)
      if (!m.is_taken[e] && (chosen == experts || m.choice[e] > m.choice[chosen])) chosen = e;  // a NaN is chosen last
    m.is_taken[chosen] = true;
    ids[k] = chosen;
    weights[k] = m.scores[chosen];
    sum += weights[k];
  }
  for (int64_t k = 0; k < spec.top_k; ++k) {
    if (spec.is_renormalized) weights[k] /= sum + least;
    weights[k] *= spec.scaling;
  }
}

}  // namespace

void route(WorkerPool& pool, const RouterSpec& spec, const float* logits, const float* bias, int64_t tokens,
           int64_t experts, int64_t* ids, float* weights) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Router, tokens);
  const int64_t size = (RouteMemory::bytes(experts) + 63) / 64 * 64;
  char* of_threads = session.scratch<char>(session.num_threads() * size);
  session.run((tokens + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t i, int thread) {
    const RouteMemory memory(of_threads + thread * size, experts);
    for (int64_t t = i * kRowsPerTask; t < std::min(tokens, (i + 1) * kRowsPerTask); ++t)
      route_row(session.kernels(), spec, logits + t * experts, bias, experts, memory, ids + t * spec.top_k,
                weights + t * spec.top_k);
  });
}

}  // namespace kt
