// See limits.h.
#include "ops/layer/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace kt {

double read_bandwidth(WorkerPool& pool, const uint8_t* data, int64_t bytes, int repeats) {
  WorkerPool::Session session(pool);
  constexpr int64_t kPart = int64_t{1} << 20;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const auto begin = std::chrono::steady_clock::now();
    session.run(bytes / kPart, [&](int64_t i) { sink ^= session.kernels().read_lines(data + i * kPart, kPart); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(bytes / kPart * kPart) / took.count());
  }
  return best;
}

namespace {

double register_peak(WorkerPool::Session& session, int64_t (*multiply)(int64_t, int32_t*), int64_t rounds,
                     int repeats) {
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    std::atomic<int64_t> operations{0};
    const auto begin = std::chrono::steady_clock::now();
    session.run(session.num_threads() * 16, [&](int64_t) {
      int32_t out[32] = {};
      operations += multiply(rounds, out);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(operations.load()) / took.count());
  }
  return best;
}

}  // namespace

double int8_peak(WorkerPool& pool, int repeats) {
  WorkerPool::Session session(pool);
  return register_peak(session, session.kernels().multiply_registers, 50000, repeats);
}

double fp32_peak(WorkerPool& pool, int repeats) {
  WorkerPool::Session session(pool);
  return register_peak(session, session.kernels().multiply_fp32, 50000, repeats);
}

double bf16_peak(WorkerPool& pool, int repeats) {
  WorkerPool::Session session(pool);
  return session.kernels().multiply_bf16 == nullptr
             ? 0
             : register_peak(session, session.kernels().multiply_bf16, 5000, repeats);
}

}  // namespace kt
