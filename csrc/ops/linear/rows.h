// What is done to rows one by one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/weights/weights.h"

namespace kt {

// Calls task(row) for every row, `per_task` rows to a task.
template <class Task> void for_rows(WorkerPool::Session& session, int64_t rows, int64_t per_task, const Task& task) {
  session.run((rows + per_task - 1) / per_task, [&](int64_t i) {
    for (int64_t r = i * per_task; r < std::min(rows, (i + 1) * per_task); ++r) task(r);
  });
}

constexpr int64_t kRowsPerTask = 8;
constexpr int64_t kElementsPerTask = 8192;
// Several short rows make one task.
inline int64_t rows_per_task(int64_t cols) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(cols, 1));
}

void dequantize_rows(WorkerPool& pool, const WeightView& weight, const int64_t* ids, int64_t count, float* out);

// The same of a table that lies in parts, one behind the other, and is seldom in memory: the pages of all its rows are
// asked for before the first one is waited for. firsts: the first row of each part.
void gather_rows(WorkerPool& pool, const std::vector<WeightView>& parts, const std::vector<int64_t>& firsts,
                 const int64_t* ids, int64_t count, float* out);

void rms_norm(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t cols, float eps, float* out);

// out = act(gate) * up; gate null: act(up). n elements. rows: that they belong to, for the profile.
void activate(WorkerPool& pool, const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out,
              int64_t rows = 0);

}  // namespace kt
