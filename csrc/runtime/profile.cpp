// See profile.h.
#include "runtime/profile.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

constexpr uint64_t kLine = 64;  // of a cache
constexpr uint16_t kPadding = 0, kStepBegin = 1, kStepEnd = 2, kOp = 3, kExperts = 4;

struct StepBeginRecord {
  RecordHeader header;
  uint64_t time_ns;
  int64_t step;
  int32_t rows, num_keep;
};

struct StepEndRecord {
  RecordHeader header;
  uint64_t time_ns;
  int64_t step;
};

struct ExpertsRecord {
  RecordHeader header;
  int32_t rows, top_k, experts, num_ids;
};

uint64_t checked_capacity(int64_t bytes) {
  if (bytes < kMinRingBytes || (bytes & (bytes - 1)) != 0)
    throw std::invalid_argument("the ring of a profile must be a power of two of at least " +
                                std::to_string(kMinRingBytes) + " bytes, got " + std::to_string(bytes));
  return static_cast<uint64_t>(bytes);
}

// Fills in all of a record but its header.
template <class Record> void fill(char* to, const Record& record) {
  std::memcpy(to + sizeof(RecordHeader), reinterpret_cast<const char*>(&record) + sizeof(RecordHeader),
              sizeof(Record) - sizeof(RecordHeader));
}

}  // namespace

const std::vector<const char*>& part_names() {
  static const std::vector<const char*> names = {"other",   "norm",     "linear",         "attention", "recurrent",
                                                 "router",  "experts",  "shared_experts", "mlp",       "embedding",
                                                 "lm_head", "sampling", "wait_cpu",       "copy",      "wait_disk",
                                                 "gpu",     "host"};
  return names;
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

ProfileScope& profile_scope() {
  static thread_local ProfileScope scope;
  return scope;
}

int64_t& profile_due_ns() {
  static thread_local int64_t due = 0;
  return due;
}

Profile::Profile(int64_t bytes) : capacity_(checked_capacity(bytes)), memory_(new uint64_t[capacity_ / 8]()) {}

char* Profile::reserve(uint64_t nbytes) {
  uint64_t head = head_.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t at = head % capacity_, padding = at + nbytes > capacity_ ? capacity_ - at : 0;
    // A head that is out of date may lie before the tail; then the exchange fails.
    const auto used = static_cast<int64_t>(head + padding + nbytes - tail_.load(std::memory_order_acquire));
    if (nbytes > capacity_ || used > static_cast<int64_t>(capacity_)) {
      num_dropped_.fetch_add(1, std::memory_order_relaxed);
      return nullptr;
    }
    if (!head_.compare_exchange_weak(head, head + padding + nbytes, std::memory_order_relaxed)) continue;
    char* const memory = reinterpret_cast<char*>(memory_.get());
    if (padding > 0) commit(memory + at, padding, kPadding, -1);
    // Nobody has looked at what lies behind for a whole round; the next record's exchange would wait for it.
    for (uint64_t ahead = 0; ahead < 3 * kLine; ahead += kLine)
      __builtin_prefetch(memory + (head + padding + nbytes + ahead) % capacity_, 1);
    return memory + (head + padding) % capacity_;
  }
}

void Profile::commit(char* record, uint64_t nbytes, uint16_t kind, int layer) {
  const RecordHeader header = {0, kind, static_cast<int16_t>(layer)};
  const auto* rest = reinterpret_cast<const char*>(&header) + sizeof header.nbytes;
  std::memcpy(record + sizeof header.nbytes, rest, sizeof header - sizeof header.nbytes);
  __atomic_store_n(reinterpret_cast<uint32_t*>(record), static_cast<uint32_t>(nbytes), __ATOMIC_RELEASE);
}

uint32_t Profile::length_at(uint64_t position) const {
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(memory_.get() + position % capacity_ / 8), __ATOMIC_ACQUIRE);
}

void Profile::begin_step(int64_t step, int32_t rows, const std::vector<int32_t>& keep) {
  {
    const std::lock_guard<std::mutex> lock(keep_mutex_);
    keep_ = keep;
  }
  char* to = reserve(sizeof(StepBeginRecord));
  if (to == nullptr) return;
  fill(to, StepBeginRecord{{}, static_cast<uint64_t>(steady_ns()), step, rows, static_cast<int32_t>(keep.size())});
  commit(to, sizeof(StepBeginRecord), kStepBegin, -1);
}

void Profile::end_step(int64_t step) {
  char* to = reserve(sizeof(StepEndRecord));
  if (to == nullptr) return;
  fill(to, StepEndRecord{{}, static_cast<uint64_t>(steady_ns()), step});
  commit(to, sizeof(StepEndRecord), kStepEnd, -1);
}

void Profile::write(OpRecord& record, int layer) {
  char* to = reserve(sizeof(OpRecord));
  if (to == nullptr) return;
  fill(to, record);
  commit(to, sizeof(OpRecord), kOp, layer);
}

void Profile::write_experts(int layer, const int64_t* ids, int64_t rows, int64_t top_k, int64_t experts) {
  const bool is_all = rows <= kAllRows;
  // Held while rows are read from keep_: the next step may begin meanwhile.
  std::unique_lock<std::mutex> lock(keep_mutex_, std::defer_lock);
  int64_t num_ids = rows;
  if (!is_all) {
    lock.lock();
    num_ids = 0;
    for (int32_t row : keep_) num_ids += row >= 0 && row < rows ? 1 : 0;
  }
  const int64_t size = static_cast<int64_t>(sizeof(ExpertsRecord)) + 4 * experts + 4 * num_ids + 2 * num_ids * top_k;
  const auto nbytes = static_cast<uint64_t>((size + 7) / 8 * 8);
  char* const to = reserve(nbytes);
  if (to == nullptr) return;
  fill(to, ExpertsRecord{{},
                         static_cast<int32_t>(rows),
                         static_cast<int32_t>(top_k),
                         static_cast<int32_t>(experts),
                         static_cast<int32_t>(num_ids)});
  auto* counts = reinterpret_cast<uint32_t*>(to + sizeof(ExpertsRecord));  // zero: the reader clears what it takes
  for (int64_t i = 0; i < rows * top_k; ++i)
    if (ids[i] < experts) ++counts[ids[i]];
  auto* index = reinterpret_cast<int32_t*>(counts + experts);
  auto* chosen = reinterpret_cast<int16_t*>(index + num_ids);
  const auto add = [&](int64_t row) {
    *index++ = static_cast<int32_t>(row);
    for (int64_t k = row * top_k; k < (row + 1) * top_k; ++k)
      *chosen++ = static_cast<int16_t>(ids[k] < experts ? ids[k] : -1);
  };
  if (is_all)
    for (int64_t row = 0; row < rows; ++row) add(row);
  else
    for (int32_t row : keep_)
      if (row >= 0 && row < rows) add(row);
  commit(to, nbytes, kExperts, layer);
}

int64_t Profile::num_ready() {
  const std::lock_guard<std::mutex> lock(reader_);
  const uint64_t tail = tail_.load(std::memory_order_relaxed);
  int64_t ready = 0;
  for (uint64_t at = tail; at < tail + capacity_;) {
    const uint32_t nbytes = length_at(at);
    if (nbytes == 0) break;
    RecordHeader header;
    std::memcpy(&header, memory_.get() + at % capacity_ / 8, sizeof header);
    if (header.kind != kPadding) ready += nbytes;
    at += nbytes;
  }
  return ready;
}

int64_t Profile::take(char* out, int64_t limit) {
  const std::lock_guard<std::mutex> lock(reader_);
  uint64_t tail = tail_.load(std::memory_order_relaxed);
  int64_t taken = 0;
  for (;;) {
    const uint32_t nbytes = length_at(tail);
    if (nbytes == 0) break;
    uint64_t* const record = memory_.get() + tail % capacity_ / 8;
    RecordHeader header;
    std::memcpy(&header, record, sizeof header);
    if (header.kind != kPadding) {
      if (taken + nbytes > limit) break;
      std::memcpy(out + taken, record, nbytes);
      taken += nbytes;
    }
    std::memset(record, 0, nbytes);
    tail += nbytes;
    tail_.store(tail, std::memory_order_release);
  }
  return taken;
}

}  // namespace kt
