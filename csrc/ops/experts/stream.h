// Experts that a GPU's stream hands to the CPU and waits for: no Python, no CUDA call and no host synchronization.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ops/experts/moe.h"

namespace kt {

// Pinned memory that all layers share. T rows at most, H hidden, K experts per token.
struct StreamBuffers {
  const void* hidden = nullptr;         // bf16 or fp32 [T, H]
  const void* ids = nullptr;            // int32 or int64 [T, K]
  const float* weights = nullptr;       // [T, K]
  void* out = nullptr;                  // bf16 or fp32 [T, H]
  const int32_t* num_tokens = nullptr;  // rows of a padded batch that hold tokens
  uint32_t* word = nullptr;             // see below; null where only host functions hand over
  int64_t max_tokens = 0, top_k = 0, hidden_size = 0;
  bool hidden_is_bf16 = false, ids_are_int64 = false, out_is_bf16 = false;
};

// One thread, the coordinator, runs the forwards as thread 0 of the pool. They reach it in one of two ways:
//
//   host functions            stream: copy in -> submit(call) ............ wait(call) -> copy out
//                             submit queues the call and returns; wait returns when its forward is done.
//
//   stream memory operations  stream: copy in -> word = W ................ until word == 0 -> copy out
//                             W is not 0 and says all there is to know: (layer + 1) << 21 | is_padded << 20 | rows.
//                             The coordinator reads W, runs the forward and writes 0. The GPU writes only when the word
//                             is 0 (its stream has waited for that), the CPU only when it is not. No value depends on
//                             how often the stream ran, so a captured graph replays as it is.
//
// In the second way nothing wakes a sleeping coordinator, for a GPU cannot: `expect` must say how many forwards are
// coming; in the first way it saves the time of waking threads up. While some are outstanding the coordinator and the
// workers of the pool spin, for kAwake at a time after the last sign of life, and the coordinator looks at the word in
// naps after that; with none outstanding all of them sleep.
//
// An error in a forward makes its rows zero and is kept for `check`, for it must not leave through CUDA's threads.
class ExpertStream {
 public:
  // What a host function gets. Lives as long as the stream.
  struct Call {
    ExpertStream* owner = nullptr;
    uint32_t word = 0;
    std::atomic<uint64_t> submitted{0}, done{0};
  };

  // Throws std::invalid_argument for missing buffers and sizes out of range.
  ExpertStream(WorkerPool& pool, const StreamBuffers& buffers);
  ~ExpertStream();
  ExpertStream(const ExpertStream&) = delete;
  ExpertStream& operator=(const ExpertStream&) = delete;

  // Number of the layer. The Moe must outlive the stream.
  int64_t add_layer(const Moe& moe);

  // W above. is_padded: the number of tokens is read from num_tokens when the forward runs and must be at most `rows`;
  // rows behind become zero. Throws std::out_of_range.
  uint32_t word_of(int64_t layer, int64_t rows, bool is_padded) const;
  // The argument for `submit` and `wait`, one per word.
  Call* call_of(uint32_t word);

  // C functions for cuLaunchHostFunc. They throw nothing.
  static void submit(void* call) noexcept;
  static void wait(void* call) noexcept;

  // So many forwards will come (negative: will not come after all).
  void expect(int64_t count);

  // Ends the coordinator after the forward that it is in. What is queued or asked for by the word counts as done, with
  // an error; so does what comes later. Closing twice is fine. Must be called before the buffers go.
  void close();

  // Rethrows the first error since the last check.
  void check();
  int64_t failed_layer() const { return failed_layer_.load(); }
  bool has_error() const { return has_error_.load(); }
  int64_t num_forwards() const { return num_forwards_.load(); }
  // Time inside forwards, conversions included.
  double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }

 private:
  // What to do next: a queued call, or the value of the word.
  struct Work {
    Call* call = nullptr;
    uint32_t word = 0;
  };

  void main();
  bool find(Work& work);
  bool next(Work& work);
  void finish(const Work& work);
  void run(uint32_t word);
  void forward(const Moe& moe, int64_t tokens);
  template <class Row> void over_rows(const Moe& moe, int64_t tokens, const Row& row);
  void zero_rows(int64_t first, int64_t end);
  void keep_error(std::exception_ptr error, int64_t layer) noexcept;
  uint32_t read_word() const;
  void clear_word();
  bool is_forked() const;

  WorkerPool& pool_;
  const StreamBuffers buffers_;
  const int64_t owner_pid_;
  std::unique_ptr<float[]> x_, y_;  // [T, H], where hidden or out is bf16
  std::unique_ptr<int64_t[]> ids_;  // [T, K], where ids are int32

  // Guards layers_, calls_, queue_, closed_, error_. On the heap, with the thread, because a forked child leaks them.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake, done;
    std::thread thread;
  };
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  std::vector<const Moe*> layers_;
  std::unordered_map<uint32_t, std::unique_ptr<Call>> calls_;
  std::deque<Call*> queue_;
  bool closed_ = false;
  std::exception_ptr error_;

  std::atomic<bool> stop_{false}, has_error_{false};
  std::atomic<int64_t> num_queued_{0}, outstanding_{0}, failed_layer_{-1}, num_forwards_{0}, busy_ns_{0};
  std::atomic<uint64_t> num_expects_{0};
  std::atomic<int> num_waiting_{0};
};

}  // namespace kt
