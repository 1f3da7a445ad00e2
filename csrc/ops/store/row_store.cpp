// See row_store.h.
#include "ops/store/row_store.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include <unistd.h>

#include "ops/linear/rows.h"

namespace kt {
namespace {

constexpr int64_t kNoted = sizeof(int64_t) + sizeof(uint32_t);  // bytes, of each row that is kept

}  // namespace

RowStore::RowStore(const std::vector<std::string>& paths, const KernelTable& kernels, const WeightView& row,
                   std::vector<Extent> parts, int64_t cache_nbytes)
    : owner_pid_(getpid()),
      files_(std::make_unique<StoreFiles>(paths)),
      as_record_{{row, 0}},
      pieces_{{0, 0, 1, 0, row.row_bytes, 0}},
      parts_(std::move(parts)),
      row_bytes_(row.row_bytes),
      num_sets_(std::max<int64_t>(1, cache_nbytes / ((row_bytes_ + kNoted) * kWays))),
      batch_(static_cast<size_t>(kBatch * row_bytes_)),
      places_(kBatch),
      kept_(std::make_unique<Pages>(num_sets_ * kWays * row_bytes_)),
      kept_rows_(static_cast<size_t>(num_sets_ * kWays), -1),
      last_called_(kept_rows_.size(), 0) {
  for (const Extent& part : parts_) {
    if (part.file < 0 || part.file >= files_->count())
      throw std::invalid_argument("a part of a table is of a file that is not there");
    if (part.offset < 0 || part.nbytes % row_bytes_ != 0 || part.offset + part.nbytes > files_->nbytes(part.file))
      throw std::invalid_argument(files_->path(part.file) + " does not have the table's rows whole: it is damaged");
    firsts_.push_back(num_rows_);
    num_rows_ += part.nbytes / row_bytes_;
  }
  std::iota(places_.begin(), places_.end(), int64_t{0});
  reader_ = std::make_unique<Reader>(
      *files_, kernels, kThreads, kBatch, row_bytes_, [this](int32_t, const std::string& error) { done(error); },
      [] { return false; });
}

RowStore::~RowStore() { close(); }

void RowStore::close() {
  if (getpid() != owner_pid_) {  // its threads are not here
    static_cast<void>(reader_.release());
    static_cast<void>(shared_.release());
    shared_ = std::make_unique<Shared>();
    is_closed_ = true;
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    is_closed_ = true;
    shared_->changed.notify_all();
  }
  const std::lock_guard<std::mutex> call(shared_->calls);
  if (reader_ == nullptr) return;
  reader_->close();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  stats_.bytes_read = reader_->bytes_read();
  reader_.reset();
  files_.reset();
  kept_.reset();
}

void RowStore::check_open() const {
  if (is_closed_) throw std::runtime_error("this RowStore is closed: make a new one");
}

int64_t RowStore::first_of_set(int64_t row) const {
  const uint64_t mixed = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15 >> 32;
  return static_cast<int64_t>(mixed % static_cast<uint64_t>(num_sets_)) * kWays;
}

Extent RowStore::extent_of(int64_t row) const {
  const auto part = static_cast<size_t>(std::upper_bound(firsts_.begin(), firsts_.end(), row) - firsts_.begin() - 1);
  return {parts_[part].file, parts_[part].offset + (row - firsts_[part]) * row_bytes_, row_bytes_};
}

void RowStore::gather(WorkerPool& pool, const int64_t* ids, int64_t count, float* out) {
  if (getpid() != owner_pid_)
    throw std::runtime_error(
        "this RowStore was made before fork() and has no threads here: make a new one in the child");
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= num_rows_)
      throw std::out_of_range("ids[" + std::to_string(i) + "] is " + std::to_string(ids[i]) + ", but the table has " +
                              std::to_string(num_rows_) + " rows");
  const std::lock_guard<std::mutex> call(shared_->calls);  // which closing waits for
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    check_open();
  }
  for (int64_t first = 0; first < count; first += kBatch) {
    WeightView rows = as_record_.front().view;
    rows.data = batch_.data();
    rows.rows = std::min(kBatch, count - first);
    fetch(pool, ids + first, rows.rows);
    dequantize_rows(pool, rows, places_.data(), rows.rows, out + first * rows.cols);
  }
}

// Brings rows to the batch, in their order.
void RowStore::fetch(WorkerPool& pool, const int64_t* ids, int64_t count) {
  ++num_batches_;
  wanted_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const auto set = kept_rows_.begin() + first_of_set(ids[i]), found = std::find(set, set + kWays, ids[i]);
    if (found == set + kWays) {
      wanted_.push_back({ids[i], i});
      continue;
    }
    const int64_t at = found - kept_rows_.begin();
    last_called_[static_cast<size_t>(at)] = num_batches_;
    std::memcpy(in_batch(i), kept_->data() + at * row_bytes_, static_cast<size_t>(row_bytes_));
  }
  std::sort(wanted_.begin(), wanted_.end());
  read_wanted(pool);
  const uint8_t* data = nullptr;
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (i > 0 && wanted_[i].row == wanted_[i - 1].row) {
      std::memcpy(in_batch(wanted_[i].place), data, static_cast<size_t>(row_bytes_));
      continue;
    }
    data = in_batch(wanted_[i].place);
    keep(wanted_[i].row, data);
  }
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  stats_.misses += static_cast<int64_t>(extents_.size());
  stats_.hits += count - static_cast<int64_t>(extents_.size());
}

// A row that is wanted several times is read once, to its first place.
void RowStore::read_wanted(WorkerPool& pool) {
  extents_.clear();
  destinations_.clear();
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (i > 0 && wanted_[i].row == wanted_[i - 1].row) continue;
    extents_.push_back(extent_of(wanted_[i].row));
    destinations_.push_back(in_batch(wanted_[i].place));
  }
  if (extents_.empty()) return;
  num_left_ = static_cast<int64_t>(extents_.size());  // nothing is being read: nobody else looks
  error_.clear();
  for (size_t i = 0; i < extents_.size(); ++i)
    reader_->enqueue(static_cast<int32_t>(i), {&as_record_, &pieces_, &extents_[i], destinations_[i]});
  reader_->wake();
  WorkerPool::Session session(pool);
  session.let_sleep();
  const ProfiledOp op(session, Part::WaitDisk, static_cast<int64_t>(extents_.size()), true);
  const int64_t began = steady_ns();
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return is_closed_ || num_left_ == 0; });
  stats_.waited_ns += steady_ns() - began;
  check_open();
  if (!error_.empty()) throw ReadError(error_);
}

void RowStore::keep(int64_t row, const uint8_t* data) {
  const auto set = last_called_.begin() + first_of_set(row);
  const int64_t at = std::min_element(set, set + kWays) - last_called_.begin();
  kept_rows_[static_cast<size_t>(at)] = row;
  last_called_[static_cast<size_t>(at)] = num_batches_;
  std::memcpy(kept_->data() + at * row_bytes_, data, static_cast<size_t>(row_bytes_));
}

// By a thread of the reader.
void RowStore::done(const std::string& error) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!error.empty()) {
    ++stats_.read_errors;
    if (error_.empty()) error_ = error;
  }
  if (--num_left_ == 0) shared_->changed.notify_all();
}

RowStats RowStore::stats() {
  if (getpid() != owner_pid_) return stats_;  // somebody may have held the mutex
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (reader_ != nullptr) stats_.bytes_read = reader_->bytes_read();
  return stats_;
}

std::pair<int64_t, std::string> RowStore::take_retried() {
  if (getpid() != owner_pid_) return {};
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return files_ == nullptr ? std::pair<int64_t, std::string>() : files_->take_retried();
}

}  // namespace kt
