// See stream.h.
#include "ops/experts/stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include <unistd.h>

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kAwake = std::chrono::milliseconds(1);  // longer than a layer takes on the GPU
constexpr auto kNap = std::chrono::microseconds(50);   // after kAwake, while forwards are outstanding
constexpr auto kLongNap =
    std::chrono::milliseconds(1);  // after kPatience: a step was given up, or the GPU has much to do
constexpr auto kPatience = std::chrono::milliseconds(100);

constexpr int kRowBits = 20, kLayerShift = 21;
constexpr uint32_t kPadded = 1u << kRowBits;
constexpr int64_t kMaxRows = (int64_t{1} << kRowBits) - 1, kMaxLayers = (int64_t{1} << (32 - kLayerShift)) - 1;
constexpr int64_t kSerialElements = int64_t{1} << 16;  // converted by the coordinator alone

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest even; every NaN becomes the same one.
uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

const StreamBuffers& checked(const StreamBuffers& b) {
  if (b.hidden == nullptr || b.ids == nullptr || b.weights == nullptr || b.out == nullptr || b.num_tokens == nullptr)
    throw std::invalid_argument("an ExpertStream needs buffers for hidden, ids, weights, out and num_tokens");
  if (b.max_tokens < 1 || b.max_tokens > kMaxRows)
    throw std::invalid_argument("max_tokens must be between 1 and " + std::to_string(kMaxRows) + ", got " +
                                std::to_string(b.max_tokens));
  if (b.top_k < 1 || b.hidden_size < 1) throw std::invalid_argument("top_k and hidden_size must be at least 1");
  return b;
}

}  // namespace

ExpertStream::ExpertStream(WorkerPool& pool, const StreamBuffers& buffers)
    : pool_(pool), buffers_(checked(buffers)), owner_pid_(getpid()) {
  // Uninitialized, so that a buffer for long prompts takes no memory before there is one.
  const auto floats = static_cast<size_t>(buffers.max_tokens * buffers.hidden_size);
  if (buffers.hidden_is_bf16) x_.reset(new float[floats]);
  if (buffers.out_is_bf16) y_.reset(new float[floats]);
  if (!buffers.ids_are_int64) ids_.reset(new int64_t[static_cast<size_t>(buffers.max_tokens * buffers.top_k)]);
  const BlockedSignals blocked;
  shared_->thread = std::thread([this] { main(); });
}

ExpertStream::~ExpertStream() { close(); }

bool ExpertStream::is_forked() const { return getpid() != owner_pid_; }

int64_t ExpertStream::add_layer(const Moe& moe) {
  if (moe.hidden_size() != buffers_.hidden_size)
    throw std::invalid_argument("the layer's hidden size is " + std::to_string(moe.hidden_size()) + ", the stream's " +
                                std::to_string(buffers_.hidden_size));
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (static_cast<int64_t>(layers_.size()) == kMaxLayers)
    throw std::invalid_argument("a stream has at most " + std::to_string(kMaxLayers) + " layers");
  layers_.push_back(&moe);
  return static_cast<int64_t>(layers_.size()) - 1;
}

uint32_t ExpertStream::word_of(int64_t layer, int64_t rows, bool is_padded) const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const auto count = static_cast<int64_t>(layers_.size());
  if (layer < 0 || layer >= count)
    throw std::out_of_range("layer " + std::to_string(layer) + " of a stream with " + std::to_string(count) +
                            " layers");
  if (rows < 0 || rows > buffers_.max_tokens)
    throw std::out_of_range(std::to_string(rows) + " rows do not fit into buffers for " +
                            std::to_string(buffers_.max_tokens));
  return static_cast<uint32_t>(layer + 1) << kLayerShift | (is_padded ? kPadded : 0) | static_cast<uint32_t>(rows);
}

ExpertStream::Call* ExpertStream::call_of(uint32_t word) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  std::unique_ptr<Call>& call = calls_[word];
  if (!call) {
    call = std::make_unique<Call>();
    call->owner = this;
    call->word = word;
  }
  return call.get();
}

void ExpertStream::submit(void* argument) noexcept {
  Call& call = *static_cast<Call*>(argument);
  ExpertStream& self = *call.owner;
  if (self.is_forked()) return;
  try {
    {
      const std::lock_guard<std::mutex> lock(self.shared_->mutex);
      if (self.closed_) throw std::runtime_error("this ExpertStream is closed");
      self.queue_.push_back(&call);
      call.submitted.fetch_add(1);
      self.num_queued_.fetch_add(1);
    }
    self.shared_->wake.notify_one();
  } catch (...) { self.keep_error(std::current_exception(), -1); }
}

void ExpertStream::wait(void* argument) noexcept {
  Call& call = *static_cast<Call*>(argument);
  ExpertStream& self = *call.owner;
  if (self.is_forked()) return;
  const uint64_t submitted = call.submitted.load();
  const auto is_done = [&] { return call.done.load() >= submitted; };
  // Longer spinning would take a core from the workers that it waits for.
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_done()) return;
      cpu_pause();
    }
  } while (Clock::now() < end);
  std::unique_lock<std::mutex> lock(self.shared_->mutex);
  self.num_waiting_.fetch_add(1);
  self.shared_->done.wait(lock, is_done);
  self.num_waiting_.fetch_sub(1);
}

void ExpertStream::expect(int64_t count) {
  if (is_forked())
    throw std::runtime_error(
        "this ExpertStream was made before fork() and has no thread here: make a new one in the child");
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (closed_) throw std::runtime_error("this ExpertStream is closed: make a new one");
    outstanding_.store(std::max<int64_t>(0, outstanding_.load() + count));
    num_expects_.fetch_add(1);
  }
  if (count <= 0) return;
  pool_.keep_awake(kAwake);
  shared_->wake.notify_one();
}

void ExpertStream::check() {
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    std::swap(error, error_);
    has_error_.store(false);
  }
  if (error) std::rethrow_exception(error);
}

void ExpertStream::keep_error(std::exception_ptr error, int64_t layer) noexcept {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (error_) return;
  error_ = std::move(error);
  failed_layer_.store(layer);
  has_error_.store(true);
}

void ExpertStream::close() {
  if (is_forked()) {
    static_cast<void>(shared_.release());  // its thread is not here to be joined
    shared_ = std::make_unique<Shared>();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    closed_ = true;
    stop_.store(true);
    outstanding_.store(0);
  }
  shared_->wake.notify_all();
  if (!shared_->thread.joinable()) return;  // closed before; the buffers may be gone
  shared_->thread.join();
  const bool is_asked = read_word() != 0;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    for (Call* call : queue_) call->done.fetch_add(1);
    if ((is_asked || !queue_.empty()) && !error_) {
      error_ = std::make_exception_ptr(
          std::runtime_error("the ExpertStream was closed before a forward that was submitted"));
      has_error_.store(true);
    }
    queue_.clear();
    num_queued_.store(0);
  }
  shared_->done.notify_all();
  if (is_asked) clear_word();
}

uint32_t ExpertStream::read_word() const {
  return buffers_.word == nullptr ? 0 : __atomic_load_n(buffers_.word, __ATOMIC_ACQUIRE);
}

void ExpertStream::clear_word() { __atomic_store_n(buffers_.word, 0u, __ATOMIC_RELEASE); }

// Looks for work without waiting.
bool ExpertStream::find(Work& work) {
  if (num_queued_.load() > 0) {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (!queue_.empty()) {
      work.call = queue_.front();
      work.word = work.call->word;
      queue_.pop_front();
      num_queued_.fetch_sub(1);
      return true;
    }
  }
  work.call = nullptr;
  work.word = read_word();
  return work.word != 0;
}

// Waits for work; false when the stream is to end.
bool ExpertStream::next(Work& work) {
  uint64_t seen = num_expects_.load();
  auto began = Clock::now();
  for (;;) {
    const bool is_awaited = outstanding_.load() > 0;
    const auto spin_end = began + (is_awaited ? Clock::duration(kAwake) : Clock::duration(kSpin));
    do {
      for (int i = 0; i < 32; ++i) {
        if (stop_.load(std::memory_order_relaxed)) return false;
        if (find(work)) return true;
        cpu_pause();
      }
    } while (Clock::now() < spin_end);
    std::unique_lock<std::mutex> lock(shared_->mutex);
    const auto is_called = [&] { return stop_.load() || !queue_.empty() || num_expects_.load() != seen; };
    if (outstanding_.load() > 0 && buffers_.word != nullptr) {
      const bool is_late = Clock::now() - began > kPatience;
      shared_->wake.wait_for(lock, is_late ? Clock::duration(kLongNap) : Clock::duration(kNap), is_called);
    } else {
      shared_->wake.wait(lock, is_called);
    }
    const uint64_t expects = num_expects_.load();
    if (expects == seen) continue;
    began = Clock::now();
    seen = expects;
    lock.unlock();
    if (outstanding_.load() > 0) pool_.wake();  // while the GPU is before its first layer of experts
  }
}

void ExpertStream::main() {
  pool_.bind_caller();
  Work work;
  while (next(work)) {
    const auto began = Clock::now();
    if (pool_.profile() != nullptr) profile_due_ns() = steady_ns();
    run(work.word);
    busy_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count());
    finish(work);
  }
}

void ExpertStream::finish(const Work& work) {
  num_forwards_.fetch_add(1);
  bool is_more = false;
  {
    // Before the GPU goes on: what it then submits is counted already.
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    const int64_t left = std::max<int64_t>(0, outstanding_.load() - 1);
    outstanding_.store(left);
    is_more = left > 0;
  }
  pool_.keep_awake(is_more ? Clock::duration(kAwake) : Clock::duration(0));  // cores are for those who use the result
  if (work.call == nullptr) return clear_word();
  work.call->done.fetch_add(1);
  if (num_waiting_.load() == 0) return;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);  // a waiter is now before its look at `done`, or asleep
  }
  shared_->done.notify_all();
}

void ExpertStream::run(uint32_t word) {
  const int64_t layer = static_cast<int64_t>(word >> kLayerShift) - 1, rows = word & (kPadded - 1);
  try {
    const Moe* moe = nullptr;
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      if (layer >= 0 && layer < static_cast<int64_t>(layers_.size())) moe = layers_[static_cast<size_t>(layer)];
    }
    if (moe == nullptr || rows > buffers_.max_tokens)
      throw std::out_of_range("the word " + std::to_string(word) +
                              " names no layer of this ExpertStream, or too many rows");
    const int64_t tokens = (word & kPadded) != 0 ? __atomic_load_n(buffers_.num_tokens, __ATOMIC_ACQUIRE) : rows;
    if (tokens < 0 || tokens > rows)
      throw std::out_of_range("num_tokens is " + std::to_string(tokens) + ", but the batch has " +
                              std::to_string(rows) + " rows");
    forward(*moe, tokens);
    zero_rows(tokens, rows);
  } catch (...) {
    keep_error(std::current_exception(), layer);
    zero_rows(0, std::min(rows, buffers_.max_tokens));
  }
}

// Runs row(t) for every token; on the pool when there is enough to do.
template <class Row> void ExpertStream::over_rows(const Moe& moe, int64_t tokens, const Row& row) {
  const bool is_small = tokens * buffers_.hidden_size <= kSerialElements;
  const auto all = [&] {
    for (int64_t t = 0; t < tokens; ++t) row(t);
  };
  if (is_small) return all();  // takes less than its record would
  const ScopedProfile scope(pool_, moe.layer(), Part::Experts);
  WorkerPool::Session session(pool_);
  const ProfiledOp op(session, Part::Experts, tokens, true);
  session.run(tokens, row);
}

void ExpertStream::forward(const Moe& moe, int64_t tokens) {
  const int64_t hidden = buffers_.hidden_size, pairs = tokens * buffers_.top_k;
  const auto* x = static_cast<const float*>(buffers_.hidden);
  if (buffers_.hidden_is_bf16) {
    const auto* from = static_cast<const uint16_t*>(buffers_.hidden);
    over_rows(moe, tokens, [&](int64_t t) {
      for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) x_[static_cast<size_t>(i)] = from_bf16(from[i]);
    });
    x = x_.get();
  }
  const auto* ids = static_cast<const int64_t*>(buffers_.ids);
  if (!buffers_.ids_are_int64) {
    const auto* from = static_cast<const int32_t*>(buffers_.ids);
    std::copy(from, from + pairs, ids_.get());
    ids = ids_.get();
  }
  float* y = buffers_.out_is_bf16 ? y_.get() : static_cast<float*>(buffers_.out);
  moe.forward(pool_, x, tokens, ids, buffers_.weights, buffers_.top_k, y);
  if (!buffers_.out_is_bf16) return;
  auto* to = static_cast<uint16_t*>(buffers_.out);
  over_rows(moe, tokens, [&](int64_t t) {
    for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) to[i] = to_bf16(y[i]);
  });
}

void ExpertStream::zero_rows(int64_t first, int64_t end) {
  if (first >= end) return;
  const size_t row = static_cast<size_t>(buffers_.hidden_size) * (buffers_.out_is_bf16 ? 2 : 4);
  std::memset(static_cast<char*>(buffers_.out) + static_cast<size_t>(first) * row, 0,
              static_cast<size_t>(end - first) * row);
}

}  // namespace kt
