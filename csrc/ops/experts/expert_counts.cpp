// See expert_counts.h.
#include "ops/experts/expert_counts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

void check_layer(int64_t layer, int64_t experts) {
  if (layer < -1 || layer > UINT16_MAX || experts > UINT16_MAX)
    throw std::invalid_argument("experts are counted in layers 0 to " + std::to_string(UINT16_MAX) + ", not in " +
                                std::to_string(layer) + ", and as many in each");
}

}  // namespace

void LayerCounts::add(int64_t expert, int64_t rows) {
  if (rows <= 0) return;
  const auto at = static_cast<size_t>(expert);
  add_to(rows_[at], static_cast<uint64_t>(rows));
  add_to(num_rows_, static_cast<uint64_t>(rows));
  const uint64_t call = num_calls_.load(std::memory_order_relaxed);
  if (last_[at] == call) return;
  last_[at] = call;
  add_to(num_touched_, 1);
}

void ExpertCounts::watch(int64_t layer, std::shared_ptr<LayerCounts> counts) {
  check_layer(layer, counts->num_experts());
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_.emplace_back(layer, std::move(counts));
}

void ExpertCounts::add(int64_t layer, const int64_t* rows, int64_t experts, int64_t calls) {
  check_layer(layer, experts);
  const std::lock_guard<std::mutex> lock(mutex_);
  LayerCounts* counts = nullptr;
  for (const auto& [number, known] : own_)
    if (number == layer && known->num_experts() == experts) counts = known.get();
  if (counts == nullptr) {
    own_.emplace_back(layer, std::make_shared<LayerCounts>(experts));
    counts = own_.back().second.get();
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    counts->last_[static_cast<size_t>(expert)] = LayerCounts::kNever;  // a part of a call counts as one of its own
    counts->add(expert, rows[expert]);
  }
  LayerCounts::add_to(counts->num_calls_, static_cast<uint64_t>(calls));
}

bool ExpertCounts::is_watched(int64_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(watched_.begin(), watched_.end(), [&](const auto& known) { return known.first == layer; });
}

void ExpertCounts::follow(const int64_t* rows, int64_t* before, int64_t layers, int64_t experts) {
  std::vector<int64_t> made(static_cast<size_t>(experts));
  for (int64_t layer = 0; layer < layers; ++layer, rows += experts, before += experts) {
    if (std::equal(rows, rows + experts, before)) continue;
    for (int64_t expert = 0; expert < experts; ++expert)
      made[static_cast<size_t>(expert)] = rows[expert] - before[expert];
    std::copy(rows, rows + experts, before);
    add(layer, made.data(), experts, is_watched(layer) ? 0 : 1);
  }
}

ExpertTotals ExpertCounts::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ExpertTotals sum;
  for (const auto* list : {&watched_, &own_})
    for (const auto& [layer, counts] : *list) {
      static_cast<void>(layer);
      sum.num_rows += counts->num_rows();
      sum.num_calls += counts->num_calls();
      sum.num_touched += counts->num_touched();
    }
  return sum;
}

std::vector<ExpertCount> ExpertCounts::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ExpertCount> news;
  for (const auto* list : {&watched_, &own_})
    for (const auto& [layer, counts] : *list)
      for (size_t expert = 0; layer >= 0 && expert < counts->rows_.size(); ++expert) {
        const uint64_t now = counts->rows_[expert].load(std::memory_order_relaxed), old = counts->taken_[expert];
        if (now == old) continue;
        const uint64_t rows = now - old > UINT32_MAX ? UINT32_MAX : now - old;
        news.push_back({static_cast<uint16_t>(layer), static_cast<uint16_t>(expert), static_cast<uint32_t>(rows)});
        counts->taken_[expert] = old + rows;
      }
  return news;
}

}  // namespace kt
