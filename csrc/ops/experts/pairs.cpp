// See pairs.h.
#include "ops/experts/pairs.h"

#include <algorithm>

namespace kt {

SortedPairs sort_pairs(WorkerPool::Session& session, const int64_t* ids, int64_t tokens, int64_t top_k,
                       int64_t num_experts) {
  SortedPairs r;
  const int planes = session.planes();
  r.chunk_size = kPairChunk / planes;
  const Span<int64_t> next = session.span<int64_t>(num_experts + 1);
  std::fill(next.begin(), next.end(), 0);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] < num_experts) ++next[ids[i] + 1];
  r.groups.data = session.scratch<SortedPairs::Group>(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = next[e + 1], first = next[e];
    next[e + 1] = first + count;
    if (count == 0) continue;
    r.groups[r.groups.count++] = {e, first, count, r.chunks};
    r.chunks += (count + r.chunk_size - 1) / r.chunk_size;
  }
  r.token = session.span<int32_t>(next[num_experts]);
  r.pair_of = session.span<int64_t>(tokens * top_k);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    if (ids[i] >= num_experts) {
      r.pair_of[i] = -1;
      continue;
    }
    const int64_t pair = next[ids[i]]++;
    r.pair_of[i] = pair;
    r.token[pair] = static_cast<int32_t>(i / top_k);
  }
  if (planes > 1) {
    r.plane = session.span<int32_t>(r.token.count * planes);
    for (int64_t i = 0; i < r.plane.count; ++i)
      r.plane[i] = static_cast<int32_t>(r.token[i / planes] * planes + i % planes);
  }
  return r;
}

PairChunk chunk_at(const SortedPairs& r, int64_t i) {
  const auto after = std::upper_bound(r.groups.begin(), r.groups.end(), i,
                                      [](int64_t n, const SortedPairs::Group& g) { return n < g.tasks_before; });
  const SortedPairs::Group& g = *(after - 1);
  const int64_t skip = (i - g.tasks_before) * r.chunk_size;
  return {g.expert, g.first + skip, static_cast<int>(std::min(r.chunk_size, g.count - skip))};
}

const int32_t* input_rows(const SortedPairs& r, int64_t first, int planes) {
  return planes > 1 ? r.plane.data + first * planes : r.token.data + first;
}

Span<TokenGroup> token_groups(WorkerPool::Session& session, const SortedPairs& r, bool is_input, int planes) {
  const Span<TokenGroup> groups = session.span<TokenGroup>(r.chunks);
  for (int64_t i = 0; i < r.chunks; ++i) {
    const PairChunk c = chunk_at(r, i);
    groups[i] = {is_input ? input_rows(r, c.first, planes) : nullptr, c.first * planes, c.count * planes};
  }
  return groups;
}

}  // namespace kt
