// Records that are held outside of calls, while they are copied elsewhere: see expert_store.h.
#include <algorithm>

#include "ops/store/expert_store.h"

namespace kt {

// Before the mutex is locked, which somebody may have held when this process was forked.
void ExpertStore::check_owner() const {
  if (is_forked()) throw std::runtime_error("this ExpertStore was made before fork() and has no memory here");
}

int64_t ExpertStore::checked_record(int64_t layer, int64_t expert) const {
  check_open();
  const Layer& of = layers_.at(static_cast<size_t>(layer));
  if (expert < 0 || expert >= of.num_experts)
    throw std::invalid_argument("layer " + std::to_string(layer) + " has no expert " + std::to_string(expert));
  return of.first_record + expert;
}

void ExpertStore::pin_held(Pool& pool, int32_t at) {
  Slot& slot = slots_[static_cast<size_t>(at)];
  ++slot.pins;
  ++slot.holds;
  ++pool.num_held;
  set_guest(pool, slot, false);  // calls of many rows find as many slots of guests as ever
}

void ExpertStore::unpin_held(Pool& pool, int32_t at) {
  --slots_[static_cast<size_t>(at)].holds;
  --pool.num_held;
  unpin(at);
}

const uint8_t* ExpertStore::hold(int64_t layer, int64_t expert) {
  check_owner();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const int64_t record = checked_record(layer, expert);
  Pool& pool = pools_[layer_of(record).pool];
  const int32_t at = slot_of_[static_cast<size_t>(record)];
  if (at < 0 || slots_[static_cast<size_t>(at)].state != State::Ready || pool.num_held >= pool.max_guests)
    return nullptr;
  pin_held(pool, at);
  return slots_[static_cast<size_t>(at)].data;
}

// Whether there is a slot; begins to read.
bool ExpertStore::acquire_held(Pool& pool, int64_t record) {
  int32_t at = slot_of_[static_cast<size_t>(record)];
  if (at < 0) {
    if (pool.empty.empty()) {
      find_victims(pool, 1, Among::All, found_);
      if (found_.empty()) return false;
    }
    at = pool.empty.empty() ? take_from(pool, found_.front().second) : take_empty(pool);
    begin_read(at, record);
  } else if (slots_[static_cast<size_t>(at)].is_filled) {
    reader_->hurry(at);
  }
  pin_held(pool, at);
  return true;
}

std::vector<const uint8_t*> ExpertStore::read(int64_t layer, const std::vector<int64_t>& experts) {
  check_owner();
  std::unique_lock<std::mutex> lock(shared_->mutex);
  std::vector<int64_t> records;
  for (int64_t expert : experts) records.push_back(checked_record(layer, expert));
  Pool& pool = pools_[layers_.at(static_cast<size_t>(layer)).pool];
  if (static_cast<int64_t>(records.size()) > pool.max_guests - pool.num_held)
    throw std::invalid_argument(std::to_string(records.size()) + " records are more than may be held at once");
  std::vector<int32_t> slots;
  const auto state = [&](int32_t at) { return slots_[static_cast<size_t>(at)].state; };
  ++num_visits_;
  try {
    for (;;) {
      check_open();
      while (slots.size() < records.size() && acquire_held(pool, records[slots.size()]))
        slots.push_back(slot_of_[static_cast<size_t>(records[slots.size()])]);
      reader_->wake();
      for (int32_t at : slots)
        if (state(at) == State::Failed) throw ReadError(errors_.at(at));
      const auto is_ready = [&](int32_t at) { return state(at) == State::Ready; };
      if (slots.size() == records.size() && std::all_of(slots.begin(), slots.end(), is_ready)) break;
      shared_->changed.wait(lock);
    }
  } catch (...) {
    for (int32_t at : slots) unpin_held(pool, at);
    --num_visits_;
    shared_->changed.notify_all();
    throw;
  }
  --num_visits_;
  shared_->changed.notify_all();
  std::vector<const uint8_t*> found;
  for (int32_t at : slots) found.push_back(slots_[static_cast<size_t>(at)].data);
  return found;
}

void ExpertStore::release(int64_t layer, int64_t expert, bool is_kept) {
  check_owner();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const int64_t record = checked_record(layer, expert);
  Pool& pool = pools_[layer_of(record).pool];
  const int32_t at = slot_of_[static_cast<size_t>(record)];
  if (at < 0 || slots_[static_cast<size_t>(at)].holds == 0)
    throw std::invalid_argument("expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
                                " is not held");
  unpin_held(pool, at);
  if (!is_kept && slots_[static_cast<size_t>(at)].pins == 0) {
    slot_of_[static_cast<size_t>(record)] = -1;
    clear(at);
  }
  shared_->changed.notify_all();
}

std::pair<const uint8_t*, int64_t> ExpertStore::memory() const {
  check_open();
  return {memory_->data(), stats_.slot_nbytes};
}

}  // namespace kt
