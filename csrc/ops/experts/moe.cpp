// See moe.h.
#include "ops/experts/moe.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

constexpr int64_t kScratchFloats = int64_t{48} << 20;  // of intermediate and output rows held at once

int64_t count_experts(const ExpertMatrices& m, const std::vector<const uint8_t*>& pointers, const ExpertStore* store,
                      int64_t layer) {
  const size_t kinds = m.gate.exists() ? 3 : 2;
  if (store != nullptr) {
    if (store->parts(layer).size() != kinds)
      throw std::invalid_argument("the store's records have " + std::to_string(store->parts(layer).size()) +
                                  " matrices, the layer " + std::to_string(kinds));
    return store->num_experts(layer);
  }
  if (pointers.empty() || pointers.size() % kinds != 0)
    throw std::invalid_argument("gate, up and down must have the same number of experts, at least one");
  return static_cast<int64_t>(pointers.size() / kinds);
}

}  // namespace

Moe::Moe(const ExpertMatrices& matrices, std::vector<const uint8_t*> pointers, ActSpec act, int layer,
         ExpertStore* store, int64_t store_layer)
    : matrices_(matrices),
      pointers_(std::move(pointers)),
      act_(act),
      layer_(layer),
      store_(store),
      store_layer_(store_layer),
      num_experts_(count_experts(matrices_, pointers_, store, store_layer)),
      counts_(std::make_shared<LayerCounts>(num_experts_)) {
  ExpertProjection &gate = matrices_.gate, &up = matrices_.up, &down = matrices_.down;
  if (down.cols != up.rows || down.rows != up.cols || (gate.exists() && (gate.rows != up.rows || gate.cols != up.cols)))
    throw std::invalid_argument("expert shapes must be gate [I, H], up [I, H], down [H, I]");
  size_t kind = 0;
  for (ExpertProjection* p : {&gate, &up, &down}) {
    if (!p->exists()) continue;
    const WeightView view = make_view(p->type, nullptr, p->rows, p->cols, p->layout);
    if (store == nullptr) {
      p->experts = pointers_.data() + kind++ * static_cast<size_t>(num_experts_);
      continue;
    }
    const RecordPart& part = store->parts(store_layer)[kind++];
    if (part.view.type != view.type || part.view.rows != view.rows || part.view.cols != view.cols ||
        part.view.tile_bytes != view.tile_bytes)
      throw std::invalid_argument("the matrices of the store's records are others than the layer's");
    p->offset = part.offset;
  }
}

void Moe::forward(WorkerPool& pool, const float* x, int64_t tokens, const int64_t* ids, const float* weights,
                  int64_t top_k, float* out) const {
  if (top_k > kMaxTopK)
    throw std::invalid_argument("top_k is " + std::to_string(top_k) + ", at most " + std::to_string(kMaxTopK) +
                                " can be combined");
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] < 0 || ids[i] > num_experts())
      throw std::out_of_range("topk_ids[" + std::to_string(i / top_k) + ", " + std::to_string(i % top_k) + "] is " +
                              std::to_string(ids[i]) + ", but there are " + std::to_string(num_experts()) + " experts");
  const ScopedProfile scope(pool, layer_, Part::Experts);
  const ExpertProjection &up = matrices_.up, &down = matrices_.down;
  const int64_t per_token = std::max<int64_t>(1, top_k * (up.rows + down.rows));
  const int64_t chunk = std::max<int64_t>(1, kScratchFloats / per_token);
  for (int64_t t = 0; t < tokens; t += chunk) {
    WorkerPool::Session session(pool);
    if (t == 0) counts_->begin_call();
    Profile* const profile = t == 0 ? session.profile() : nullptr;
    if (profile != nullptr) profile->write_experts(profile_scope().layer, ids, tokens, top_k, num_experts());
    forward_chunk(session, x + t * up.cols, ids + t * top_k,
                  {std::min(chunk, tokens - t), top_k, weights + t * top_k, out + t * down.rows}, t == 0);
  }
}

void Moe::forward_chunk(WorkerPool::Session& session, const float* x, const int64_t* ids,
                        const MoeRun::Combining& combining, bool is_first) const {
  SortedPairs sorted;
  {
    const ProfiledOp op(session, Part::Experts, combining.tokens, true, kSort);
    sorted = sort_pairs(session, ids, combining.tokens, combining.top_k, num_experts());
  }
  for (const SortedPairs::Group& group : sorted.groups) counts_->add(group.expert, group.count);
  if (store_ == nullptr)
    MoeRun(session, matrices_, act_, sorted, x, combining).run();
  else
    forward_stored(session, x, sorted, combining, is_first);
}

// What is there is computed first, then what has come meanwhile, until all is done.
void Moe::forward_stored(WorkerPool::Session& session, const float* x, const SortedPairs& sorted,
                         const MoeRun::Combining& combining, bool is_first) const {
  const int64_t count = sorted.groups.count;
  const Span<Visited> experts = session.span<Visited>(count);
  for (int64_t i = 0; i < count; ++i) experts[i] = {static_cast<int32_t>(sorted.groups[i].expert)};
  const auto records = session.span<const uint8_t*>(num_experts_);
  const auto wave = session.span<SortedPairs::Group>(count);
  auto chosen = session.span<int32_t>(count);
  ExpertMatrices matrices = matrices_;
  for (ExpertProjection* p : {&matrices.gate, &matrices.up, &matrices.down}) p->experts = records.data;
  MoeRun run(session, matrices, act_, sorted, x, combining);
  Visit visit(*store_, store_layer_, experts, sorted.token.count, !is_first);
  while (visit.num_left() > 0) {
    visit.take(chosen);
    if (chosen.empty()) {
      session.let_sleep();
      const ProfiledOp op(session, Part::WaitDisk, combining.tokens, true);
      visit.wait();
      continue;
    }
    for (int64_t i = 0; i < chosen.count; ++i) {
      wave[i] = sorted.groups[chosen[i]];
      records[wave[i].expert] = visit.record(chosen[i]);
    }
    if (chosen.count == count) return run.run();
    run.run_wave({wave.data, chosen.count});
    visit.finish(chosen);
  }
  run.combine_all();
}

}  // namespace kt
