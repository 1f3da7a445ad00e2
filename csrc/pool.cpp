// See pool.h.
#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#if defined(KT_X86)
#include <immintrin.h>
#endif

namespace kt {
namespace {

// Long enough to bridge the gap between two operators of a decode step, short enough that an idle pool costs nothing.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int64_t kMinScratch = int64_t{1} << 20;
constexpr int64_t kKeepScratch = int64_t{256} << 20;

#if defined(KT_X86)
void pause() { _mm_pause(); }
unsigned set_float_mode(unsigned mode) {
  const unsigned old = _mm_getcsr();
  if (old != mode) _mm_setcsr(mode);
  return old;
}
constexpr unsigned kFloatMode = 0x1f80;  // round to nearest, no flushing to zero, all exceptions masked
#else
void pause() { std::this_thread::yield(); }
unsigned set_float_mode(unsigned) { return 0; }
constexpr unsigned kFloatMode = 0;
#endif

template <class Done> bool spin_until(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

// Signals are for the program's own threads: a worker that took Ctrl-C would delay it.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

 private:
  sigset_t old_;
};

}  // namespace

void WorkerPool::FreeDeleter::operator()(void* p) const { std::free(p); }

WorkerPool::WorkerPool(int num_threads, const KernelTable& kernels)
    : num_threads_(num_threads), kernels_(kernels), owner_pid_(getpid()) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw std::invalid_argument("num_threads must be between 1 and " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(num_threads));
  const BlockedSignals blocked;
  try {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { worker_main(); });
  } catch (...) {
    close();
    throw;
  }
}

WorkerPool::~WorkerPool() { close(); }

void WorkerPool::close() {
  if (getpid() != owner_pid_) {
    // After fork() the threads are not there to be joined; their handles must not be destroyed while joinable.
    new std::vector<std::thread>(std::move(threads_));
    threads_.clear();
    static_cast<void>(sleep_.release());
    return;
  }
  const std::lock_guard<std::mutex> lock(call_mutex_);
  closed_ = true;
  stop_.store(true);
  posted_.fetch_add(1);
  {
    const std::lock_guard<std::mutex> sleep_lock(sleep_->mutex);
  }
  sleep_->wake.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  blocks_.clear();
}

WorkerPool::Session::Session(WorkerPool& pool) : pool_(pool) {
  if (getpid() != pool.owner_pid_)
    throw std::runtime_error("this WorkerPool was made before fork() and has no threads here: make a new one in the child");
  lock_ = std::unique_lock<std::mutex>(pool.call_mutex_);
  if (pool.closed_) throw std::runtime_error("this WorkerPool is closed: make a new one");
  pool.block_ = 0;
  pool.used_ = 0;
  caller_mode_ = set_float_mode(kFloatMode);
}

WorkerPool::Session::~Session() {
  set_float_mode(caller_mode_);
  int64_t total = 0;
  for (const auto& block : pool_.blocks_) total += block.second;
  if (pool_.blocks_.size() > 1 || total > kKeepScratch) {
    // One block of the size that was needed serves the next call without growing, unless that would hold a lot.
    pool_.blocks_.clear();
    if (total <= kKeepScratch) {
      char* p = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(total)));
      if (p != nullptr) pool_.blocks_.emplace_back(p, total);
    }
  }
}

void* WorkerPool::scratch(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].second) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const int64_t size = bytes > kMinScratch ? bytes : kMinScratch;
    char* p = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size)));
    if (p == nullptr) throw std::bad_alloc();
    blocks_.emplace_back(p, size);
    used_ = 0;
  }
  void* result = blocks_[block_].first.get() + used_;
  used_ += bytes;
  return result;
}

void WorkerPool::work() {
  const Job job = job_;
  for (;;) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= job.count) return;
    try {
      job.fn(job.context, i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      next_.store(job.count, std::memory_order_relaxed);
    }
  }
}

void WorkerPool::run(int64_t count, TaskFn fn, const void* context) {
  if (count <= 0) return;
  if (count == 1 || num_threads_ == 1) {
    for (int64_t i = 0; i < count; ++i) fn(context, i);
    return;
  }
  job_ = {fn, context, count};
  next_.store(0, std::memory_order_relaxed);
  const uint64_t number = posted_.load(std::memory_order_relaxed) + 1;
  open_.store(number);
  posted_.store(number);
  if (sleepers_.load() > 0) {
    // Taking the mutex once makes sure that a worker between its last look at posted_ and its wait hears the call.
    {
      const std::lock_guard<std::mutex> lock(sleep_->mutex);
    }
    sleep_->wake.notify_all();
  }
  work();
  open_.store(0);
  while (!spin_until([this] { return active_.load() == 0; })) std::this_thread::yield();
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

void WorkerPool::worker_main() {
  set_float_mode(kFloatMode);
  uint64_t seen = 0;
  for (;;) {
    const auto posted = [&] { return posted_.load() != seen; };
    if (!spin_until(posted)) {
      std::unique_lock<std::mutex> lock(sleep_->mutex);
      sleepers_.fetch_add(1);
      sleep_->wake.wait(lock, posted);
      sleepers_.fetch_sub(1);
    }
    if (stop_.load()) return;
    seen = posted_.load();
    active_.fetch_add(1);
    if (open_.load() != 0) work();
    active_.fetch_sub(1);
  }
}

}  // namespace kt
