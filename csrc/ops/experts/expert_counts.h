// How often each expert is used: exact, always on.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kt {

// Of one layer. Whoever adds holds whatever keeps other calls of the layer away; anybody may read.
class LayerCounts {
 public:
  explicit LayerCounts(int64_t experts)
      : rows_(static_cast<size_t>(experts)),
        last_(static_cast<size_t>(experts), kNever),
        taken_(static_cast<size_t>(experts), 0) {}

  // A call, which `add` then tells of, in one part or several.
  void begin_call() { add_to(num_calls_, 1); }
  void add(int64_t expert, int64_t rows);

  int64_t num_experts() const { return static_cast<int64_t>(rows_.size()); }
  uint64_t num_rows() const { return num_rows_.load(); }
  uint64_t num_calls() const { return num_calls_.load(); }
  uint64_t num_touched() const { return num_touched_.load(); }

 private:
  friend class ExpertCounts;
  static constexpr uint64_t kNever = UINT64_MAX;
  static void add_to(std::atomic<uint64_t>& sum, uint64_t count) {
    sum.store(sum.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  }
  std::vector<std::atomic<uint64_t>> rows_;  // of each expert
  std::vector<uint64_t> last_;               // number of the last call that used it, or kNever
  std::vector<uint64_t> taken_;              // guarded by ExpertCounts
  std::atomic<uint64_t> num_rows_{0}, num_calls_{0}, num_touched_{0};
};

// New rows of an expert since they were taken the last time.
struct ExpertCount {
  uint16_t layer, expert;
  uint32_t rows;
};

struct ExpertTotals { uint64_t num_rows = 0, num_calls = 0, num_touched = 0; };

// Of a model's layers, some of which may have several sources.
class ExpertCounts {
 public:
  // Layer -1, one without a number, counts for the totals alone.
  void watch(int64_t layer, std::shared_ptr<LayerCounts> counts);
  // What others counted: rows [experts] of one layer, as `calls` calls of it.
  void add(int64_t layer, const int64_t* rows, int64_t experts, int64_t calls);
  // Rows of all layers so far, [layers][experts] as somebody else counts them: what is new since the last call counts,
  // as a call of each layer where nothing is watched, and as part of one where something is.
  void follow(const int64_t* rows, int64_t* before, int64_t layers, int64_t experts);
  ExpertTotals totals();
  std::vector<ExpertCount> take();

 private:
  bool is_watched(int64_t layer);

  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::shared_ptr<LayerCounts>>> watched_, own_;
};

}  // namespace kt
