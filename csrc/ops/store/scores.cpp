// See scores.h.
#include "ops/store/scores.h"

#include <cmath>

namespace kt {
namespace {

constexpr double kLargest = 1e12;

}  // namespace

ExpertScores::ExpertScores(int64_t records) : last_(static_cast<size_t>(records), 0) {
  for (Counts* counts : {&recent_, &remembered_}) counts->scaled.assign(static_cast<size_t>(records), 0.0);
}

void ExpertScores::Counts::grow(double factor) {
  newest *= factor;
  if (newest <= kLargest) return;
  for (double& one : scaled) one /= newest;
  newest = 1.0;
}

void ExpertScores::begin_step() {
  static const double recent = std::exp2(1 / kHalfLife), remembered = std::exp2(1 / kRemembered);
  ++step_;
  recent_.grow(recent);
  remembered_.grow(remembered);
}

void ExpertScores::pick(int64_t record) {
  const auto at = static_cast<size_t>(record);
  recent_.scaled[at] += recent_.newest;
  remembered_.scaled[at] += remembered_.newest;
  last_[at] = step_;
}

std::vector<double> ExpertScores::remembered() const {
  std::vector<double> made = remembered_.scaled;
  for (double& one : made) one /= remembered_.newest;
  return made;
}

void ExpertScores::start(const std::vector<double>& remembered) {
  remembered_ = {remembered, 1.0};
  recent_ = {remembered, 1.0};
  // As many recent picks as the newest steps would have had at this rate, the last one just now.
  for (double& one : recent_.scaled) one *= kHalfLife / kRemembered;
  for (int64_t& step : last_) step = step_;
}

}  // namespace kt
