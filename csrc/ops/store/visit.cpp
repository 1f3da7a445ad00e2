// One call of a layer whose experts are in a store: see expert_store.h.
#include <algorithm>

#include "ops/store/expert_store.h"

namespace kt {
namespace {

// A record that comes takes the place of one in a call of many rows if it is worth so many times as much, and so many
// picks of this very step more.
constexpr double kMargin = 4, kHeadStart = 2;

}  // namespace

Visit::Visit(ExpertStore& store, int64_t layer, Span<Visited> experts, int64_t num_pairs, bool is_more)
    : store_(store),
      layer_(store.layers_.at(static_cast<size_t>(layer))),
      experts_(experts),
      is_stream_(num_pairs >= layer_.num_experts),
      num_left_(experts.count) {
  if (store.is_forked())
    throw std::runtime_error(
        "this ExpertStore was made before fork() and has no threads here: make a new one in the child");
  const std::lock_guard<std::mutex> lock(store.shared_->mutex);
  store.check_open();
  pool_ = &store.pools_[layer_.pool];
  num_lacking_ = experts.count;
  const bool is_step = !store.is_probed_;
  if (is_step && !is_more && layer <= store.last_layer_) store.scores_->begin_step();
  if (is_step) store.last_layer_ = layer;
  for (Visited& one : experts) {
    if (is_step && !is_more) store.scores_->pick(store.record_of(layer_, one.expert));
    if (join(one)) {
      ExpertStore::Slot& slot = store.slots_[static_cast<size_t>(one.slot)];
      one.was_there = slot.state == State::Ready;
      if (!is_stream_) store.set_guest(*pool_, slot, false);
    }
    if (is_step) ++(one.was_there ? store.stats_.hits : store.stats_.misses);
  }
  ++store.num_visits_;
  acquire(true);
}

Visit::~Visit() {
  const std::lock_guard<std::mutex> lock(store_.shared_->mutex);
  for (const Visited& one : experts_)
    if (one.slot >= 0 && !one.is_done) store_.unpin(one.slot);
  --store_.num_visits_;
  store_.shared_->changed.notify_all();
}

// Pins what lacked a slot, if it is in one now, or being read to it.
bool Visit::join(Visited& one) {
  const int32_t there = store_.slot_of_[static_cast<size_t>(store_.record_of(layer_, one.expert))];
  if (there < 0) return false;
  ExpertStore::Slot& slot = store_.slots_[static_cast<size_t>(there)];
  if (slot.is_filled) store_.reader_->hurry(there);
  one.slot = there;
  ++slot.pins;
  --num_lacking_;
  ++num_held_;
  return true;
}

// Has what lacks a slot read, as far as there are slots.
void Visit::acquire(bool is_first) {
  for (Visited& one : experts_) {  // others may have asked for it since
    if (is_first || num_lacking_ == 0) break;
    if (one.slot < 0) join(one);
  }
  if (num_lacking_ == 0) return;
  ExpertStore::Victims &found = store_.found_, &guests = store_.guests_;
  found.clear();
  guests.clear();
  if (!is_stream_) {
    store_.find_victims(*pool_, num_lacking_, ExpertStore::Among::All, found);
  } else {
    // Later it has guests' slots to read to, unless others took them.
    if (is_first || num_held_ == 0) store_.find_victims(*pool_, num_lacking_, ExpertStore::Among::Regulars, found);
    store_.find_victims(*pool_, std::min(num_lacking_, pool_->max_guests), ExpertStore::Among::Guests, guests);
  }
  size_t next = 0, next_guest = 0;
  bool is_any = false;
  const double head_start = kHeadStart * store_.scores_->pick_worth();
  for (Visited& one : experts_) {
    if (one.slot >= 0 || (store_.is_probed_ && join(one))) continue;  // in a probe several experts are one record
    const int64_t record = store_.record_of(layer_, one.expert);
    const bool has_victim = next < found.size();
    const bool is_worth =
        has_victim && (!is_stream_ || store_.scores_->worth(record) > kMargin * found[next].first + head_start);
    const bool is_guest = has_victim && !is_worth && pool_->num_guests < pool_->max_guests;
    if (!pool_->empty.empty()) {
      one.slot = store_.take_empty(*pool_);
    } else if (is_worth || is_guest) {
      one.slot = store_.take_from(*pool_, found[next++].second);
      store_.set_guest(*pool_, store_.slots_[static_cast<size_t>(one.slot)], is_guest);
    } else if (next_guest < guests.size()) {
      one.slot = store_.take_from(*pool_, guests[next_guest++].second);
      store_.set_guest(*pool_, store_.slots_[static_cast<size_t>(one.slot)], true);
    } else {
      break;
    }
    store_.slots_[static_cast<size_t>(one.slot)].pins = 1;
    store_.begin_read(one.slot, record);
    one.is_own = true;
    --num_lacking_;
    ++num_held_;
    is_any = true;
  }
  if (is_any) store_.reader_->wake();
}

bool Visit::is_ready(const Visited& one) const {
  return one.slot >= 0 && !one.is_done && store_.slots_[static_cast<size_t>(one.slot)].state == State::Ready;
}

// Throws for a read of this call that failed. One that others asked for may have failed before this call began: what it
// was to bring is read again.
void Visit::check() {
  store_.check_open();
  if (store_.errors_.empty()) return;
  for (Visited& one : experts_) {
    if (one.slot < 0 || one.is_done) continue;
    const auto found = store_.errors_.find(one.slot);
    if (found == store_.errors_.end()) continue;
    if (one.is_own) throw ReadError(found->second);
    store_.unpin(one.slot);
    one.slot = -1;
    --num_held_;
    ++num_lacking_;
  }
  acquire(false);
}

void Visit::take(Span<int32_t>& chosen) {
  const std::lock_guard<std::mutex> lock(store_.shared_->mutex);
  check();
  // Where some lack a slot, reading goes on while a part of the others is computed: those first that were read for it.
  const int64_t some = std::max<int64_t>(1, (is_stream_ ? pool_->max_guests : num_held_) / 2),
                limit = num_lacking_ > 0 ? some : num_left_;
  chosen.count = 0;
  for (const bool was_there : {false, true})
    for (int64_t i = 0; i < experts_.count && chosen.count < limit; ++i)
      if (experts_[i].was_there == was_there && is_ready(experts_[i]))
        chosen.data[chosen.count++] = static_cast<int32_t>(i);
}

void Visit::wait() {
  const int64_t began = steady_ns();
  std::unique_lock<std::mutex> lock(store_.shared_->mutex);
  const auto is_any_ready = [&] {
    return std::any_of(experts_.begin(), experts_.end(), [&](const Visited& one) { return is_ready(one); });
  };
  for (;;) {
    check();
    if (num_held_ == 0) acquire(false);  // all slots were others'
    if (is_any_ready()) break;
    store_.shared_->changed.wait(lock);
  }
  if (!store_.is_probed_) store_.stats_.waited_ns += steady_ns() - began;
}

void Visit::finish(Span<int32_t> chosen) {
  const std::lock_guard<std::mutex> lock(store_.shared_->mutex);
  for (int32_t place : chosen) {
    experts_[place].is_done = true;
    store_.unpin(experts_[place].slot);
  }
  num_held_ -= chosen.count;
  num_left_ -= chosen.count;
  acquire(false);
  store_.shared_->changed.notify_all();
}

const uint8_t* Visit::record(int64_t place) const {
  return store_.slots_[static_cast<size_t>(experts_[place].slot)].data;
}

}  // namespace kt
