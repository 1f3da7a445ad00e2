// A pool of threads that run one job at a time. The caller is worker 0.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <signal.h>

#include "runtime/profile.h"
#include "runtime/types.h"

namespace kt {

constexpr int kMaxThreads = 1024;
constexpr int kMaxNodes = 64;

// Part of an array that somebody else owns; here mostly scratch memory of a session.
template <class T> struct Span {
  T* data = nullptr;
  int64_t count = 0;

  bool empty() const { return count == 0; }
  T& operator[](int64_t i) const { return data[i]; }
  T* begin() const { return data; }
  T* end() const { return data + count; }
};

// The first task behind those of each node.
struct NodeEnds {
  std::array<int64_t, kMaxNodes> ends;
  int count;
};

// Tells the core that this is a spinning loop.
void cpu_pause();

// Sets the floating-point mode of the calling thread that every tier counts on: round to nearest, subnormals kept.
void use_kernel_float_mode();

// Signals are for the program's own threads: a thread that took Ctrl-C would delay it. A thread inherits the mask of
// the one that starts it.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t old_;
};

// Where a thread works: the node whose memory is near, the CPUs that it is bound to, or none for any, and whether these
// are efficiency cores of a hybrid processor.
struct ThreadPlace {
  int node = 0;
  std::vector<int> cpus;
  bool is_slow = false;
};

// Tasks that each thread begins with: those of its node (ends[n] is the first behind those of node n) in equal parts;
// in order of the nodes, then of the threads. A node without threads leaves its tasks to be stolen from nobody: there
// must be none. Returns first and end of every thread.
std::vector<std::pair<int64_t, int64_t>> share_tasks(const std::vector<int64_t>& ends,
                                                     const std::vector<ThreadPlace>& places);

class WorkerPool {
 public:
  // places: one per thread, the caller's first; its CPUs are ignored, for the caller is not ours to pin. Nodes must be
  // numbered from 0, each with a thread, in ascending order; slow threads come last, with one node and not the caller.
  // Throws std::invalid_argument otherwise, and for less than 1 or more than kMaxThreads threads or kMaxNodes nodes.
  // planes: into how many rows of int8 products quantize each row of activations, see ops/linear/activations.h; 1 or 2.
  WorkerPool(std::vector<ThreadPlace> places, const KernelTable& kernels, int planes = 1);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  const KernelTable& kernels() const { return kernels_; }
  int num_nodes() const { return places_.back().node + 1; }
  int num_bound() const { return num_bound_.load(); }
  // Slow threads take no part in jobs from now on, or do again. A thread that is late may take tasks of one more job.
  void rest_slow(bool rests) { slow_rest_.store(rests); }
  // Jobs handed to the threads so far; those that the caller did alone do not count.
  uint64_t num_jobs() const { return groups_[kFast].posted.load(); }

  // For tests and benchmarks. A thread's tasks take `times` as long, as on a slow core; and a worker does not begin
  // with jobs, as if the system gave it no core, until it is let go (and before the pool is closed).
  void slow_down(int thread, int times) { slots_.at(static_cast<size_t>(thread)).slowness.store(times); }
  void hold(int thread, bool is_held) { slots_.at(static_cast<size_t>(thread)).is_held.store(is_held); }

  // For this long (from now; 0: not longer than usual) threads without work do not go to sleep: a job is coming. Slow
  // ones do.
  void keep_awake(std::chrono::nanoseconds time);
  // Those that sleep already get up, if they are to be awake.
  void wake();

  // Binds the calling thread, which will be thread 0 of jobs, to the CPUs of that thread's place.
  void bind_caller() const;

  // Records are written from now on, into a ring of so many bytes, which is kept until the pool goes; the profile that
  // there is goes on where it was. Throws std::invalid_argument for another size than before.
  void start_profile(int64_t ring_bytes);
  void stop_profile() { profile_.store(nullptr); }
  // Where operations write their records; nullptr: they write none.
  Profile* profile() const { return profile_.load(std::memory_order_acquire); }
  // What was started last, whether it was stopped or not; nullptr before.
  Profile* last_profile() const { return profile_memory_.get(); }

  // Joins the threads. Later sessions throw. Closing twice is fine.
  void close();

  // Of jobs while records are written, summed up. wait_ns: from handing a job over until another thread began with it,
  // of each of the num_starts threads that came.
  struct JobTimes { int64_t busy_ns = 0, wait_ns = 0, num_starts = 0, num_jobs = 0; };

  // The right to run jobs: calls from several threads wait for one another here. Sets the floating-point mode that
  // every tier counts on (round to nearest, subnormals kept) and puts the caller's back.
  class Session {
   public:
    explicit Session(WorkerPool& pool);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Calls task(i) for every i in [0, count), each once, on any thread, and returns when all are done. An exception
    // in a task cancels those not begun and is thrown here. A task may also take the number of the thread that runs it.
    template <class Task> void run(int64_t count, const Task& task) {
      const Tasks tasks = {&count, 1, call<Task>, &task};
      pool_.run(&tasks, 1);
    }
    // The same where tasks belong to nodes. Threads of other nodes take them only when they have nothing left to do.
    template <class Task> void run_on_nodes(const NodeEnds& ends, const Task& task) {
      const Tasks tasks = {ends.ends.data(), ends.count, call<Task>, &task};
      pool_.run(&tasks, 1);
    }
    // Two kinds of tasks in one job, which saves the threads a second start. A thread begins with tasks of `second`
    // when all of `first` were begun, though not all need be done: one that needs their results calls wait_until.
    template <class First, class Second>
    void run_both(const NodeEnds& first_ends, const First& first, const NodeEnds& second_ends, const Second& second) {
      const Tasks tasks[] = {{first_ends.ends.data(), first_ends.count, call<First>, &first},
                             {second_ends.ends.data(), second_ends.count, call<Second>, &second}};
      pool_.run(tasks, 2);
    }
    // From within a task of `second`: returns when is_done() is true, or false when a task has thrown, after which what
    // is waited for may never come.
    template <class Done> bool wait_until(const Done& is_done) const {
      for (int64_t spins = 0; !is_done(); ++spins) {
        if (pool_.is_cancelled_.load(std::memory_order_relaxed)) return false;
        if (spins < kSpins)
          cpu_pause();
        else
          std::this_thread::yield();  // its core may be what the awaited thread lacks
      }
      return true;
    }

    // Memory for this session, 64-byte aligned, uninitialized. Each call takes the next part. Not from within tasks.
    template <class T> T* scratch(int64_t count) {
      return static_cast<T*>(pool_.scratch(count * static_cast<int64_t>(sizeof(T))));
    }
    template <class T> Span<T> span(int64_t count) { return {scratch<T>(count), count}; }

    // The next job takes a while to come: threads without work sleep, whatever keep_awake was told.
    void let_sleep() const { pool_.keep_awake(std::chrono::nanoseconds(0)); }

    const KernelTable& kernels() const { return pool_.kernels_; }
    int num_threads() const { return pool_.num_threads_; }
    int planes() const { return pool_.planes_; }
    int num_nodes() const { return pool_.num_nodes(); }
    Profile* profile() const { return pool_.profile(); }
    JobTimes job_times() const { return pool_.job_times(); }

   private:
    static constexpr int64_t kSpins = 1000;  // some tens of microseconds
    template <class Task> static void call(const void* context, int64_t i, int thread) {
      const Task& task = *static_cast<const Task*>(context);
      if constexpr (std::is_invocable_v<const Task&, int64_t, int>)
        task(i, thread);
      else
        task(i), static_cast<void>(thread);
    }
    WorkerPool& pool_;
    std::unique_lock<std::mutex> lock_;
    unsigned caller_mode_;
  };

 private:
  using TaskFn = void (*)(const void* context, int64_t i, int thread);
  static constexpr int kMaxKinds = 2;  // of tasks in a job

  // Tasks of one kind: `ends` as of NodeEnds.
  struct Tasks {
    const int64_t* ends;
    int num_nodes;
    TaskFn fn;
    const void* context;
    int64_t count() const { return ends[num_nodes - 1]; }
  };

  // How a job is handed over. The caller fills job_ and the ranges while no job is open and no worker is busy, then
  // publishes its number in open_. A worker says that it is busy BEFORE it looks at open_, so that either it sees the
  // job closed, or the caller, which closes the job before it looks at who is busy, waits for it. Workers that wake
  // late find the job closed and go back to sleep; nobody waits for them.
  struct Job {
    std::array<std::pair<TaskFn, const void*>, kMaxKinds> kinds;
    int num_kinds = 0;
    int64_t posted_ns = 0;  // when it was handed over, if that is recorded
  };

  // Every thread begins with an equal run of neighbouring tasks, which read neighbouring memory, and takes them from
  // the front; who has none left takes the back half of what another one still has; then those of the next kind.
  struct alignas(64) Slot {
    std::array<std::atomic<uint64_t>, kMaxKinds> ranges{};  // next task and the task after the last, 32 bits each
    std::atomic<bool> is_busy{false}, is_held{false};
    std::atomic<int> slowness{1};  // see slow_down
  };

  // Of a thread, as in JobTimes. Lines of their own, which nobody else looks at while jobs run.
  struct alignas(64) ThreadTimes { std::atomic<int64_t> busy_ns{0}, wait_ns{0}, num_starts{0}; };

  void run(const Tasks* kinds, int num_kinds);
  void run_alone(const Tasks& tasks);
  void work(int thread);
  JobTimes job_times() const;
  void run_task(const Job& job, size_t kind, int64_t task, int thread, int slowness);
  bool take(Slot& slot, size_t kind, int64_t& task);
  bool steal(int thread, size_t kind, int64_t& task);
  bool any_busy() const;
  void worker_main(int thread);
  void* scratch(int64_t bytes);

  const std::vector<ThreadPlace> places_;
  const int num_threads_, num_fast_;
  std::atomic<int> num_bound_{0};
  std::atomic<bool> slow_rest_{false};
  const KernelTable& kernels_;
  const int planes_;
  const int64_t owner_pid_;
  std::vector<std::thread> threads_;
  std::mutex call_mutex_;
  bool closed_ = false;  // guarded by call_mutex_

  Job job_;
  std::vector<Slot> slots_;        // one per thread
  std::atomic<uint64_t> open_{0};  // number of the open job, 0 when none is open
  std::atomic<bool> is_cancelled_{false};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;

  // On the heap because a forked child must leak it: destroying a condition variable waits for its waiters, and the
  // child does not have them.
  struct Sleep {
    std::mutex mutex;
    std::condition_variable wake;
  };
  // Fast threads and slow ones sleep apart, so that a job without slow ones leaves them asleep.
  enum { kFast, kSlow };
  struct alignas(64) ThreadGroup {
    std::atomic<uint64_t> posted{0};  // number of their last job; a change wakes them
    std::unique_ptr<Sleep> sleep = std::make_unique<Sleep>();
    std::atomic<int> sleepers{0};
    void wake_all();
  };
  std::array<ThreadGroup, 2> groups_;
  std::atomic<int64_t> awake_until_{0};  // nanoseconds of the steady clock

  std::vector<ThreadTimes> thread_times_;  // one per thread
  JobTimes job_times_;                     // guarded by call_mutex_; busy_ns: of jobs that the caller did alone
  std::unique_ptr<Profile> profile_memory_;
  std::atomic<Profile*> profile_{nullptr};

  struct FreeDeleter { void operator()(void* p) const; };
  std::vector<std::pair<std::unique_ptr<char, FreeDeleter>, int64_t>> blocks_;
  size_t block_ = 0;  // the block in use
  int64_t used_ = 0;  // bytes of it that are taken
};

// Sets the thread's ProfileScope for a while, where records are written. layer -1: the one it has.
class ScopedProfile {
 public:
  ScopedProfile(const WorkerPool& pool, int layer, Part part, uint8_t op = 0) : is_set_(pool.profile() != nullptr) {
    if (!is_set_) return;
    old_ = profile_scope();
    profile_scope() = {static_cast<int16_t>(layer < 0 ? old_.layer : layer), part, op};
  }
  ~ScopedProfile() {
    if (is_set_) profile_scope() = old_;
  }
  ScopedProfile(const ScopedProfile&) = delete;
  ScopedProfile& operator=(const ScopedProfile&) = delete;

 private:
  const bool is_set_;
  ProfileScope old_;
};

// One operation, from here to the end of the scope, for the profile; nothing but a load where there is none. They do
// not nest. To be made within a session, which keeps other operations of the pool away.
class ProfiledOp {
 public:
  // part, op: unless the thread's ProfileScope has others; is_own: whatever that says.
  ProfiledOp(const WorkerPool::Session& session, Part part, int64_t rows, bool is_own = false, uint8_t op = 0);
  ~ProfiledOp() {
    if (profile_ != nullptr) write();
  }
  ProfiledOp(const ProfiledOp&) = delete;
  ProfiledOp& operator=(const ProfiledOp&) = delete;

  bool is_on() const { return profile_ != nullptr; }
  // Weights, keys and values that were read.
  void add_bytes(int64_t bytes) { bytes_ += bytes; }
  // Of bytes that another part, or phase of it, reads in the same jobs. Time is divided as the bytes are.
  void add_bytes_of(Part part, int64_t bytes, uint8_t op = 0) {
    other_part_ = part;
    other_op_ = op;
    other_bytes_ += bytes;
  }

 private:
  void write();
  Profile* const profile_;
  const WorkerPool::Session& session_;
  ProfileScope scope_;
  Part other_part_ = Part::Other;
  uint8_t other_op_ = 0;
  WorkerPool::JobTimes before_;
  int64_t rows_ = 0, begin_ns_ = 0, bytes_ = 0, other_bytes_ = 0, wait_ns_ = 0;
};

}  // namespace kt
