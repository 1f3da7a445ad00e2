// See rows.h.
#include "ops/rows.h"

namespace kt {

void dequantize_rows(WorkerPool& pool, const WeightView& weight, const int64_t* ids, int64_t count, float* out) {
  WorkerPool::Session session(pool);
  for_rows(session, count, rows_per_task(weight.cols), [&](int64_t i) {
    session.kernels().dequantize_row(weight.type, weight.data + ids[i] * weight.row_bytes, weight.cols,
                                     out + i * weight.cols);
  });
}

void rms_norm(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t cols, float eps,
              float* out) {
  WorkerPool::Session session(pool);
  for_rows(session, rows, rows_per_task(cols),
           [&](int64_t r) { session.kernels().rms_norm_row(x + r * cols, weight, cols, eps, out + r * cols); });
}

void activate(WorkerPool& pool, const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out) {
  WorkerPool::Session session(pool);
  session.run((n + kElementsPerTask - 1) / kElementsPerTask, [&](int64_t i) {
    const int64_t first = i * kElementsPerTask;
    session.kernels().activate(spec, gate ? gate + first : nullptr, up + first, std::min(kElementsPerTask, n - first),
                               out + first);
  });
}

}  // namespace kt
