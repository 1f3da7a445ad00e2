// See streams.h.
#include "ops/layer/streams.h"

#include <algorithm>
#include <cmath>

#include "ops/linear/linear.h"
#include "ops/linear/rows.h"
#include "runtime/profile.h"

namespace kt {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMixedColumns = 512;  // of a task; a block of each stream lies on the stack

float mean_square(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  for (int64_t j = 0; i < n; ++i, ++j) lanes[j] += x[i] * x[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0] / static_cast<float>(n);
}

// Divides each column of a matrix [n, n] by its sum.
inline void divide_columns(float* comb, int64_t n, float eps) {
  float sums[kMaxStreams];
  for (int64_t j = 0; j < n; ++j) sums[j] = comb[j];
  for (int64_t i = 1; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) sums[j] += comb[i * n + j];
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) comb[i * n + j] /= sums[j] + eps;
}

inline void divide_rows(float* comb, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = comb[i * n];
    for (int64_t j = 1; j < n; ++j) sum += comb[i * n + j];
    for (int64_t j = 0; j < n; ++j) comb[i * n + j] /= sum + eps;
  }
}

// Sinkhorn and Knopp: sums of rows and columns become 1.
inline void balance(float* comb, int64_t n, int64_t iterations, float eps) {
  divide_columns(comb, n, eps);
  for (int64_t k = 1; k < iterations; ++k) {
    divide_rows(comb, n, eps);
    divide_columns(comb, n, eps);
  }
}

// products: [S, width] of one row.
void collapse_row(const KernelTable& kernels, const HyperSpec& spec, const HyperWeights& weights, const float* x,
                  const float* products, float* post, float* comb, float* out) {
  constexpr int64_t kMaxWidth = (2 + kMaxStreams) * kMaxStreams;
  const int64_t n = spec.streams, width = spec.width();
  const float norm = 1.0f / std::sqrt(mean_square(x, spec.columns()) + spec.norm_eps);
  float mixed[kMaxWidth];
  for (int64_t w = 0; w < width; ++w) {
    float sum = products[w];
    for (int64_t s = 1; s < spec.shares; ++s) sum += products[s * width + w];
    mixed[w] = sum * norm * weights.scale[w < n ? 0 : w < 2 * n ? 1 : 2] + weights.base[w];
  }
  kernels.activate({ActKind::Sigmoid, 0, 0}, nullptr, mixed, 2 * n, mixed);
  for (int64_t i = 0; i < n; ++i) {
    mixed[i] += spec.eps;
    post[i] = 2.0f * mixed[n + i];
    kernels.softmax_row(mixed + (2 + i) * n, n, comb + i * n);
  }
  for (int64_t i = 0; i < n * n; ++i) comb[i] += spec.eps;
  if (n == 4)
    balance(comb, 4, spec.iterations, spec.eps);  // unrolled
  else
    balance(comb, n, spec.iterations, spec.eps);
  const float* streams[kMaxStreams];
  for (int64_t i = 0; i < n; ++i) streams[i] = x + i * spec.hidden;
  kernels.combine_row(streams, mixed, static_cast<int>(n), spec.hidden, out);
}

}  // namespace

void collapse_streams(WorkerPool& pool, const HyperSpec& spec, const HyperWeights& weights, const float* x,
                      int64_t rows, float* products, float* post, float* comb, float* out) {
  const int64_t n = spec.streams, width = spec.width(), columns = spec.columns(), share = columns / spec.shares;
  const WeightView fn =
      make_view(QType::F32, reinterpret_cast<const uint8_t*>(weights.fn), spec.shares * width, share, Layout::Rows);
  batched_linear(pool, x, rows, spec.shares, fn, products, Part::Norm);
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows);
  for_rows(session, rows, rows_per_task(columns), [&](int64_t r) {
    collapse_row(session.kernels(), spec, weights, x + r * columns, products + r * spec.shares * width, post + r * n,
                 comb + r * n * n, out + r * spec.hidden);
  });
}

void mix_streams(WorkerPool& pool, int64_t streams, int64_t hidden, const float* y, const float* post,
                 const float* comb, int64_t rows, float* x) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows);
  const int64_t blocks = (hidden + kMixedColumns - 1) / kMixedColumns;
  for_rows(session, rows * blocks, rows_per_task(streams * kMixedColumns), [&](int64_t i) {
    alignas(64) float mixed[kMaxStreams][kMixedColumns];
    const int64_t row = i / blocks, first = i % blocks * kMixedColumns;
    const int64_t count = std::min(kMixedColumns, hidden - first);
    const float* parts[1 + kMaxStreams] = {y + row * hidden + first};
    for (int64_t n = 0; n < streams; ++n) parts[1 + n] = x + (row * streams + n) * hidden + first;
    for (int64_t m = 0; m < streams; ++m) {
      float factors[1 + kMaxStreams] = {post[row * streams + m]};
      for (int64_t n = 0; n < streams; ++n) factors[1 + n] = comb[(row * streams + n) * streams + m];
      session.kernels().combine_row(parts, factors, static_cast<int>(1 + streams), count, mixed[m]);
    }
    for (int64_t m = 0; m < streams; ++m) std::copy_n(mixed[m], count, x + (row * streams + m) * hidden + first);
  });
}

void norm_streams(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t streams, int64_t hidden,
                  float eps, float* out) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows);
  for_rows(session, rows * streams, rows_per_task(hidden), [&](int64_t i) {
    session.kernels().rms_norm_row(x + i * hidden, weight + i % streams * hidden, hidden, eps, out + i * hidden);
  });
}

void gate_streams(WorkerPool& pool, const float* normed, int64_t rows, int64_t streams, int64_t hidden, float* gates,
                  float* out) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Norm, rows);
  const int64_t blocks = (hidden + kMixedColumns - 1) / kMixedColumns;
  float factors[kMaxStreams];
  std::fill_n(factors, streams, 1.0f / static_cast<float>(streams));
  for_rows(session, rows * blocks, rows_per_task(streams * kMixedColumns), [&](int64_t i) {
    const int64_t row = i / blocks, first = i % blocks * kMixedColumns;
    const int64_t count = std::min(kMixedColumns, hidden - first);
    const float* parts[kMaxStreams];
    for (int64_t n = 0; n < streams; ++n) {
      const int64_t at = (row * streams + n) * hidden + first;
      session.kernels().activate({ActKind::Sigmoid, 0, 0}, gates + at, normed + at, count, gates + at);
      parts[n] = gates + at;
    }
    session.kernels().combine_row(parts, factors, static_cast<int>(streams), count, out + row * hidden + first);
  });
}

}  // namespace kt
