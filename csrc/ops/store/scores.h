// What records are worth: the score of ktransformers/cache/hot_experts.py, where the slots are those of RAM.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kt {

// A record is worth the picks of the last steps, of which each counts half after kHalfLife steps, divided by the steps
// since the last one and kRecency. Whoever calls keeps other calls away.
class ExpertScores {
 public:
  static constexpr double kHalfLife = 32, kRecency = 16;
  static constexpr double kRemembered = 2048;  // steps after which a pick counts half for the next start

  explicit ExpertScores(int64_t records);

  void begin_step();
  void pick(int64_t record);
  // Comparable with others of the same step.
  double worth(int64_t record) const {
    const auto at = static_cast<size_t>(record);
    return recent_.scaled[at] / (static_cast<double>(step_ - last_[at]) + kRecency);
  }

  // Of one pick of this step.
  double pick_worth() const { return recent_.newest / kRecency; }

  // What `start` takes at another start: picks, those of the last few thousand steps most. [records] both.
  std::vector<double> remembered() const;
  void start(const std::vector<double>& remembered);

 private:
  // Picks as multiples of what the newest counts, so that a step touches those alone that it picks.
  struct Counts {
    std::vector<double> scaled;
    double newest = 1.0;
    void grow(double factor);
  };
  Counts recent_, remembered_;
  std::vector<int64_t> last_;  // step of the last pick
  int64_t step_ = 0;
};

}  // namespace kt
