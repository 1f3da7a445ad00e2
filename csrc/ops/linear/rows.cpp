// See rows.h.
#include "ops/linear/rows.h"

#include "runtime/pages.h"

namespace kt {
namespace {

// An element takes 0.1 to 0.3 ns: threads that sleep, as they do where a GPU computes, take longer to wake than that
// many take one.
constexpr int64_t kLookedUpPerTask = 1 << 18;

}  // namespace

void dequantize_rows(WorkerPool& pool, const WeightView& weight, const int64_t* ids, int64_t count, float* out) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Embedding, count);
  op.add_bytes(count * weight.row_bytes);
  const int64_t rows = std::max<int64_t>(1, kLookedUpPerTask / std::max<int64_t>(weight.cols, 1));
  for_rows(session, count, rows, [&](int64_t i) {
    session.kernels().dequantize_row(weight.type, weight.data + ids[i] * weight.row_bytes, weight.cols,
                                     out + i * weight.cols);
  });
}

void gather_rows(WorkerPool& pool, const std::vector<WeightView>& parts, const std::vector<int64_t>& firsts,
                 const int64_t* ids, int64_t count, float* out) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Embedding, count);
  const WeightView& any = parts.front();
  op.add_bytes(count * any.row_bytes);
  const auto row = [&](int64_t i) {
    const int64_t part = std::upper_bound(firsts.begin(), firsts.end(), ids[i]) - firsts.begin() - 1;
    return parts[part].data + (ids[i] - firsts[part]) * any.row_bytes;
  };
  const int64_t rows = std::max<int64_t>(1, kLookedUpPerTask / std::max<int64_t>(any.cols, 1));
  session.run((count + rows - 1) / rows, [&](int64_t task) {
    const int64_t first = task * rows, end = std::min(count, first + rows);
    for (int64_t i = first; i < end; ++i) read_ahead(row(i), any.row_bytes);
    for (int64_t i = first; i < end; ++i)
      session.kernels().dequantize_row(any.type, row(i), any.cols, out + i * any.cols);
  });
}

void rms_norm(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t cols, float eps,
              float* out) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Norm, rows);
  op.add_bytes(cols * static_cast<int64_t>(sizeof(float)));
  for_rows(session, rows, rows_per_task(cols),
           [&](int64_t r) { session.kernels().rms_norm_row(x + r * cols, weight, cols, eps, out + r * cols); });
}

void activate(WorkerPool& pool, const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out,
              int64_t rows) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Mlp, rows);
  session.run((n + kElementsPerTask - 1) / kElementsPerTask, [&](int64_t i) {
    const int64_t first = i * kElementsPerTask;
    session.kernels().activate(spec, gate ? gate + first : nullptr, up + first, std::min(kElementsPerTask, n - first),
                               out + first);
  });
}

}  // namespace kt
