// ProfiledOp, see pool.h.
#include "runtime/pool.h"

namespace kt {

ProfiledOp::ProfiledOp(const WorkerPool::Session& session, Part part, int64_t rows, bool is_own, uint8_t op)
    : profile_(session.profile()), session_(session) {
  if (profile_ == nullptr) return;
  scope_ = profile_scope();
  if (is_own || scope_.part == Part::Other) {
    scope_.part = part;
    scope_.op = op;
  }
  rows_ = rows;
  before_ = session.job_times();
  begin_ns_ = steady_ns();
  int64_t& due_ns = profile_due_ns();
  if (due_ns != 0) wait_ns_ = begin_ns_ - due_ns;
  due_ns = 0;
}

void ProfiledOp::write() {
  const WorkerPool::JobTimes now = session_.job_times();
  OpRecord record{};
  record.rows = static_cast<int32_t>(rows_);
  record.num_threads = static_cast<uint32_t>(session_.num_threads());
  int64_t duration = steady_ns() - begin_ns_, begin = begin_ns_;
  const int64_t jobs = now.num_jobs - before_.num_jobs, starts = now.num_starts - before_.num_starts;
  int64_t busy = now.busy_ns - before_.busy_ns, wait = wait_ns_;
  if (starts > 0) wait += (now.wait_ns - before_.wait_ns) / starts * jobs;
  const auto put = [&](Part part, uint8_t op, int64_t bytes, double share) {
    record.part = static_cast<uint8_t>(part);
    record.op = op;
    record.bytes = static_cast<uint64_t>(bytes);
    record.begin_ns = static_cast<uint64_t>(begin);
    record.duration_ns = static_cast<uint64_t>(static_cast<double>(duration) * share);
    record.busy_ns = static_cast<uint64_t>(static_cast<double>(busy) * share);
    record.wait_ns = static_cast<uint64_t>(static_cast<double>(wait) * share);
    profile_->write(record, scope_.layer);
  };
  record.num_jobs = static_cast<uint32_t>(jobs);
  if (other_bytes_ == 0) return put(scope_.part, scope_.op, bytes_, 1.0);
  const double share = static_cast<double>(bytes_) / static_cast<double>(bytes_ + other_bytes_);
  put(scope_.part, scope_.op, bytes_, share);
  begin += static_cast<int64_t>(record.duration_ns);
  duration -= static_cast<int64_t>(record.duration_ns);
  busy -= static_cast<int64_t>(record.busy_ns);
  wait -= static_cast<int64_t>(record.wait_ns);
  record.num_jobs = 0;  // counted with the first
  put(other_part_, other_op_, other_bytes_, 1.0);
}

}  // namespace kt
