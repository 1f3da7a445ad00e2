// See pool.h.
#include "runtime/pool.h"

#include "runtime/allocations.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(KT_X86)
#include <immintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kt {
namespace {

// Long enough to bridge the gap between two operators of a decode step, short enough that an idle pool costs nothing.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int64_t kMinScratch = int64_t{1} << 20;
constexpr int64_t kKeepScratch = int64_t{256} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;

// Large blocks ask for huge pages: rows of intermediate results are far apart, so that each would need a page of its
// own.
char* allocate(int64_t bytes) {
  const bool is_large = bytes >= 2 * kHugePage;
  const int64_t align = is_large ? kHugePage : 64;
  note_allocation();
  char* p = static_cast<char*>(
      std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>((bytes + align - 1) / align * align)));
#if defined(MADV_HUGEPAGE)
  if (p != nullptr && is_large)
    static_cast<void>(madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE));  // a wish only
#endif
  return p;
}

// Scratch memory that nobody has asked for, which AddressSanitizer is told of; there a gap follows each part.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kGap = 64;
void forbid(void* p, int64_t bytes) { __asan_poison_memory_region(p, static_cast<size_t>(bytes)); }
void allow(void* p, int64_t bytes) { __asan_unpoison_memory_region(p, static_cast<size_t>(bytes)); }
#else
constexpr int64_t kGap = 0;
void forbid(void*, int64_t) {}
void allow(void*, int64_t) {}
#endif

constexpr uint64_t make_range(int64_t first, int64_t end) {
  return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end);
}
constexpr int64_t range_first(uint64_t range) { return static_cast<int64_t>(range >> 32); }
constexpr int64_t range_end(uint64_t range) { return static_cast<int64_t>(range & 0xffffffffu); }
constexpr int64_t kMaxTasks = int64_t{1} << 31;  // of one hand-over

#if defined(KT_X86)
unsigned set_float_mode(unsigned mode) {
  const unsigned old = _mm_getcsr();
  if (old != mode) _mm_setcsr(mode);
  return old;
}
constexpr unsigned kFloatMode = 0x1f80;  // round to nearest, no flushing to zero, all exceptions masked
#elif defined(__aarch64__)
unsigned set_float_mode(unsigned mode) {
  uint64_t old;
  asm volatile("mrs %0, fpcr" : "=r"(old));
  if (old != mode) asm volatile("msr fpcr, %0" : : "r"(uint64_t{mode}));
  return static_cast<unsigned>(old);
}
constexpr unsigned kFloatMode = 0;  // the same
#else
unsigned set_float_mode(unsigned) { return 0; }
constexpr unsigned kFloatMode = 0;
#endif

// What the calling thread has computed for: a time in which others had its core is not part of it.
int64_t thread_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

template <class Done> bool spin_until(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

#if defined(KT_X86)
void cpu_pause() { _mm_pause(); }
#elif defined(__aarch64__)
void cpu_pause() { asm volatile("isb" : : : "memory"); }  // waits tens of cycles; `yield` waits none
#else
void cpu_pause() { std::this_thread::yield(); }
#endif

void use_kernel_float_mode() { set_float_mode(kFloatMode); }

BlockedSignals::BlockedSignals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old_);
}

BlockedSignals::~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

void WorkerPool::FreeDeleter::operator()(void* p) const { std::free(p); }

namespace {

// Calls share(thread, first, end) for the first num_threads threads.
template <class Share>
void share_out(const int64_t* ends, int num_nodes, const std::vector<ThreadPlace>& places, size_t num_threads,
               const Share& share) {
  // One range of tasks is for all threads, whatever their nodes.
  const auto belongs = [&](size_t thread, int node) { return num_nodes == 1 || places[thread].node == node; };
  int64_t first = 0;
  size_t thread = 0;
  for (int node = 0; node < num_nodes; ++node) {
    size_t last = thread;
    while (last < num_threads && belongs(last, node)) ++last;
    const auto count = static_cast<int64_t>(last - thread), tasks = ends[node] - first;
    for (int64_t i = 0; i < count; ++i, ++thread)
      share(thread, first + tasks * i / count, first + tasks * (i + 1) / count);
    first = ends[node];
  }
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> share_tasks(const std::vector<int64_t>& ends,
                                                     const std::vector<ThreadPlace>& places) {
  std::vector<std::pair<int64_t, int64_t>> shares;
  share_out(ends.data(), static_cast<int>(ends.size()), places, places.size(),
            [&](size_t, int64_t first, int64_t end) { shares.emplace_back(first, end); });
  return shares;
}

namespace {

// Binds the calling thread; a machine that refuses (a container's limits, CPUs that went away) leaves it where it is.
bool bind_to(const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &set);
  return CPU_COUNT(&set) > 0 && pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
#else
  static_cast<void>(cpus);
  return false;
#endif
}

std::vector<ThreadPlace> checked(std::vector<ThreadPlace> places) {
  if (places.empty() || places.size() > static_cast<size_t>(kMaxThreads))
    throw std::invalid_argument("num_threads must be between 1 and " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(places.size()));
  int node = 0;
  for (const ThreadPlace& place : places) {
    if (place.node != node && place.node != node + 1)
      throw std::invalid_argument("threads must be in the order of their nodes, which are numbered from 0");
    node = place.node;
  }
  if (places.front().node != 0) throw std::invalid_argument("nodes are numbered from 0");
  const auto first_slow = std::find_if(places.begin(), places.end(), [](const ThreadPlace& p) { return p.is_slow; });
  const bool is_last = std::all_of(first_slow, places.end(), [](const ThreadPlace& p) { return p.is_slow; });
  if (first_slow != places.end() && (first_slow == places.begin() || !is_last || node > 0))
    throw std::invalid_argument("slow threads come behind all others, on a machine of one node");
  if (node >= kMaxNodes) throw std::invalid_argument("there may be " + std::to_string(kMaxNodes) + " nodes at most");
  return places;
}

}  // namespace

WorkerPool::WorkerPool(std::vector<ThreadPlace> places, const KernelTable& kernels, int planes)
    : places_(checked(std::move(places))),
      num_threads_(static_cast<int>(places_.size())),
      num_fast_(static_cast<int>(
          std::count_if(places_.begin(), places_.end(), [](const ThreadPlace& p) { return !p.is_slow; }))),
      kernels_(kernels),
      planes_(planes),
      owner_pid_(getpid()),
      slots_(places_.size()),
      thread_times_(places_.size()) {
  if (planes < 1 || planes > 2) throw std::invalid_argument("planes must be 1 or 2, got " + std::to_string(planes));
  const BlockedSignals blocked;
  try {
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { worker_main(i); });
  } catch (...) {
    close();
    throw;
  }
}

WorkerPool::~WorkerPool() { close(); }

void WorkerPool::keep_awake(std::chrono::nanoseconds time) { awake_until_.store(steady_ns() + time.count()); }

void WorkerPool::wake() { groups_[kFast].wake_all(); }

void WorkerPool::ThreadGroup::wake_all() {
  if (sleepers.load() == 0) return;
  {
    // A worker between its last look at `posted` and awake_until_ and its wait hears the call then.
    const std::lock_guard<std::mutex> lock(sleep->mutex);
  }
  sleep->wake.notify_all();
}

void WorkerPool::start_profile(int64_t ring_bytes) {
  if (profile_memory_ == nullptr) profile_memory_ = std::make_unique<Profile>(ring_bytes);
  if (profile_memory_->capacity() != ring_bytes)
    throw std::invalid_argument("this WorkerPool has a profile with a ring of " +
                                std::to_string(profile_memory_->capacity()) + " bytes");
  profile_.store(profile_memory_.get());
}

void WorkerPool::bind_caller() const { static_cast<void>(bind_to(places_.front().cpus)); }

void WorkerPool::close() {
  if (getpid() != owner_pid_) {
    // After fork() the threads are not there to be joined; their handles must not be destroyed while joinable.
    new std::vector<std::thread>(std::move(threads_));
    threads_.clear();
    for (ThreadGroup& group : groups_) static_cast<void>(group.sleep.release());
    return;
  }
  const std::lock_guard<std::mutex> lock(call_mutex_);
  closed_ = true;
  stop_.store(true);
  for (ThreadGroup& group : groups_) {
    group.posted.fetch_add(1);
    group.wake_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  blocks_.clear();
}

WorkerPool::Session::Session(WorkerPool& pool) : pool_(pool) {
  if (getpid() != pool.owner_pid_)
    throw std::runtime_error(
        "this WorkerPool was made before fork() and has no threads here: make a new one in the child");
  lock_ = std::unique_lock<std::mutex>(pool.call_mutex_);
  if (pool.closed_) throw std::runtime_error("this WorkerPool is closed: make a new one");
  pool.block_ = 0;
  pool.used_ = 0;
  for (const auto& block : pool.blocks_) forbid(block.first.get(), block.second);
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
      char* p = allocate(total);
      if (p != nullptr) pool_.blocks_.emplace_back(p, total);
    }
  }
}

void* WorkerPool::scratch(int64_t wanted) {
  const int64_t bytes = (wanted + 63) / 64 * 64 + kGap;
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].second) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const int64_t size = bytes > kMinScratch ? bytes : kMinScratch;
    char* p = allocate(size);
    if (p == nullptr) throw std::bad_alloc();
    blocks_.emplace_back(p, size);
    forbid(p, size);
    used_ = 0;
  }
  void* result = blocks_[block_].first.get() + used_;
  allow(result, wanted);
  used_ += bytes;
  return result;
}

bool WorkerPool::take(Slot& slot, size_t kind, int64_t& task) {
  uint64_t range = slot.ranges[kind].load(std::memory_order_relaxed);
  while (range_first(range) < range_end(range)) {
    task = range_first(range);
    if (slot.ranges[kind].compare_exchange_weak(range, make_range(task + 1, range_end(range)))) return true;
  }
  return false;
}

// Takes the back half of the longest range of this node, or else of any, runs its first task, and leaves the rest in
// the slot of `thread`. The slot of a thread without tasks is empty, and nobody else fills it.
bool WorkerPool::steal(int thread, size_t kind, int64_t& task) {
  const int node = places_[static_cast<size_t>(thread)].node;
  for (;;) {
    Slot* victim = nullptr;
    uint64_t longest = 0;
    bool is_near = false;
    for (int i = 1; i < num_threads_; ++i) {
      const auto other = static_cast<size_t>((thread + i) % num_threads_);
      const uint64_t range = slots_[other].ranges[kind].load(std::memory_order_relaxed);
      const int64_t left = range_end(range) - range_first(range);
      const bool near = places_[other].node == node;
      if (left <= 0 || (is_near && !near)) continue;
      if (near != is_near || left > range_end(longest) - range_first(longest)) {
        victim = &slots_[other];
        longest = range;
        is_near = near;
      }
    }
    if (victim == nullptr) return false;
    const int64_t first = range_first(longest), end = range_end(longest), middle = first + (end - first) / 2;
    if (!victim->ranges[kind].compare_exchange_strong(longest, make_range(first, middle))) continue;
    slots_[static_cast<size_t>(thread)].ranges[kind].store(make_range(middle + 1, end));
    task = middle;
    return true;
  }
}

void WorkerPool::run_task(const Job& job, size_t kind, int64_t task, int thread, int slowness) {
  const int64_t began = slowness > 1 ? thread_ns() : 0;
  try {
    job.kinds[kind].first(job.kinds[kind].second, task, thread);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
    is_cancelled_.store(true, std::memory_order_relaxed);
  }
  if (slowness == 1) return;
  for (const int64_t end = began + slowness * (thread_ns() - began); thread_ns() < end;) cpu_pause();
}

void WorkerPool::work(int thread) {
  const Job job = job_;
  Slot& slot = slots_[static_cast<size_t>(thread)];
  const int64_t began = job.posted_ns == 0 || thread == 0 ? job.posted_ns : steady_ns();
  const int slowness = slot.slowness.load(std::memory_order_relaxed);
  for (size_t kind = 0; kind < static_cast<size_t>(job.num_kinds); ++kind) {
    int64_t task = 0;
    while ((take(slot, kind, task) || steal(thread, kind, task)) && !is_cancelled_.load(std::memory_order_relaxed))
      run_task(job, kind, task, thread, slowness);
  }
  if (job.posted_ns == 0) return;
  const auto add = [](std::atomic<int64_t>& sum, int64_t more) {  // nobody else writes
    sum.store(sum.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  };
  ThreadTimes& times = thread_times_[static_cast<size_t>(thread)];
  add(times.busy_ns, steady_ns() - began);
  if (thread == 0) return;
  add(times.wait_ns, began - job.posted_ns);
  add(times.num_starts, 1);
}

bool WorkerPool::any_busy() const {
  for (const Slot& slot : slots_)
    if (slot.is_busy.load()) return true;
  return false;
}

void WorkerPool::run_alone(const Tasks& tasks) {
  const int64_t began = profile() != nullptr ? steady_ns() : 0;
  for (int64_t i = 0; i < tasks.count(); ++i) tasks.fn(tasks.context, i, 0);
  if (began == 0) return;
  job_times_.busy_ns += steady_ns() - began;
}

// So far; while no job runs.
WorkerPool::JobTimes WorkerPool::job_times() const {
  JobTimes sum = job_times_;
  for (const ThreadTimes& one : thread_times_) {
    sum.busy_ns += one.busy_ns.load(std::memory_order_relaxed);
    sum.wait_ns += one.wait_ns.load(std::memory_order_relaxed);
    sum.num_starts += one.num_starts.load(std::memory_order_relaxed);
  }
  return sum;
}

void WorkerPool::run(const Tasks* kinds, int num_kinds) {
  int64_t count = 0;
  for (int kind = 0; kind < num_kinds; ++kind) count += kinds[kind].count();
  if (count <= 0) return;
  const bool has_slow = num_fast_ < num_threads_ && !slow_rest_.load(std::memory_order_relaxed);
  const int num_threads = has_slow ? num_threads_ : num_fast_;
  if (count == 1 || num_threads == 1) {
    for (int kind = 0; kind < num_kinds; ++kind) run_alone(kinds[kind]);
    return;
  }
  if (count >= kMaxTasks) throw std::length_error("a job of " + std::to_string(count) + " tasks is too long");
  job_.num_kinds = num_kinds;
  job_.posted_ns = profile() != nullptr ? steady_ns() : 0;
  for (size_t kind = 0; kind < static_cast<size_t>(num_kinds); ++kind) {
    job_.kinds[kind] = {kinds[kind].fn, kinds[kind].context};
    const auto give = [&](size_t thread, int64_t first, int64_t end) {
      slots_[thread].ranges[kind].store(make_range(first, end), std::memory_order_relaxed);
    };
    share_out(kinds[kind].ends, kinds[kind].num_nodes, places_, static_cast<size_t>(num_threads), give);
    // What a cancelled job left there.
    for (int thread = num_threads; thread < num_threads_; ++thread) give(static_cast<size_t>(thread), 0, 0);
  }
  const uint64_t number = groups_[kFast].posted.load(std::memory_order_relaxed) + 1;
  open_.store(number);
  for (size_t group = kFast; group <= (has_slow ? kSlow : kFast); ++group) {
    groups_[group].posted.store(number);
    groups_[group].wake_all();
  }
  work(0);
  open_.store(0);
  while (!spin_until([this] { return !any_busy(); })) std::this_thread::yield();
  if (job_.posted_ns != 0) ++job_times_.num_jobs;
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    std::swap(error, error_);
  }
  is_cancelled_.store(false, std::memory_order_relaxed);
  if (error) std::rethrow_exception(error);
}

void WorkerPool::worker_main(int thread) {
  if (bind_to(places_[static_cast<size_t>(thread)].cpus)) num_bound_.fetch_add(1);
  use_kernel_float_mode();
  Slot& slot = slots_[static_cast<size_t>(thread)];
  ThreadGroup& group = groups_[thread < num_fast_ ? kFast : kSlow];
  uint64_t seen = 0;
  const auto posted = [&] { return group.posted.load() != seen; };
  const auto is_kept_awake = [&] { return thread < num_fast_ && steady_ns() < awake_until_.load(); };
  for (;;) {
    while (!spin_until(posted)) {
      if (is_kept_awake()) continue;
      std::unique_lock<std::mutex> lock(group.sleep->mutex);
      group.sleepers.fetch_add(1);
      group.sleep->wake.wait(lock, [&] { return posted() || is_kept_awake(); });
      group.sleepers.fetch_sub(1);
    }
    while (slot.is_held.load(std::memory_order_relaxed)) std::this_thread::yield();
    seen = group.posted.load();
    if (stop_.load()) return;  // behind `seen`: what close() posts later still wakes this thread
    slot.is_busy.store(true);
    if (open_.load() != 0) work(thread);
    slot.is_busy.store(false);
  }
}

}  // namespace kt
