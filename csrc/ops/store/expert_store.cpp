// See expert_store.h.
#include "ops/store/expert_store.h"

#include <algorithm>
#include <numeric>

#include <unistd.h>

namespace kt {
namespace {

constexpr int64_t kWaveBytes = int64_t{32} << 20;  // that are read while others are computed
constexpr int64_t kLeastWave = 4, kMostWave = 16;  // records
constexpr int64_t kGuestShare = 8;                 // of a pool's records at most one in so many has a guest's slot

std::string mebibytes(int64_t nbytes) { return std::to_string((nbytes + (1 << 20) - 1) >> 20) + " MiB"; }

}  // namespace

ExpertStore::ExpertStore(const std::vector<std::string>& paths, const KernelTable& kernels, int num_threads)
    : owner_pid_(getpid()), files_(std::make_unique<StoreFiles>(paths)), kernels_(kernels), num_threads_(num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw std::invalid_argument("io_threads must be between 1 and " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(num_threads));
}

ExpertStore::~ExpertStore() { close(); }

bool ExpertStore::is_forked() const { return getpid() != owner_pid_; }

void ExpertStore::check_open() const {
  if (is_closed_ || !is_open_)
    throw std::runtime_error(is_closed_ ? "this ExpertStore is closed: make a new one"
                                        : "this ExpertStore was not opened yet");
}

int64_t ExpertStore::add_layer(std::vector<RecordPart> parts, int64_t record_nbytes,
                               const std::vector<std::vector<Extent>>& extents) {
  if (is_open_ || is_closed_) throw std::invalid_argument("layers are added before the store is opened");
  if (record_nbytes < 1 || record_nbytes % kDiskBlock != 0)
    throw std::invalid_argument("records have a multiple of " + std::to_string(kDiskBlock) + " bytes, not " +
                                std::to_string(record_nbytes));
  if (extents.empty()) throw std::invalid_argument("there must be at least one expert");
  for (const RecordPart& part : parts)
    if (part.offset < 0 || part.offset % 64 != 0 || part.offset + weight_bytes(part.view) > record_nbytes)
      throw std::invalid_argument("a part lies outside of its record, or not at a multiple of 64 bytes");
  const bool is_as_in_memory = extents.front().size() == 1;
  Layer layer;
  layer.per_expert = is_as_in_memory ? 1 : parts.size();
  for (const std::vector<Extent>& of_expert : extents) {
    if (of_expert.size() != layer.per_expert)
      throw std::invalid_argument("an expert has one extent, or one of each of its parts, and all experts as many");
    for (size_t i = 0; i < of_expert.size(); ++i) {
      const Extent& one = of_expert[i];
      const int64_t wanted = is_as_in_memory ? record_nbytes : parts[i].view.rows * parts[i].view.row_bytes;
      if (one.file < 0 || one.file >= files_->count())
        throw std::invalid_argument("an extent is of a file that is not there");
      if (one.nbytes != wanted || (is_as_in_memory && one.offset % kDiskBlock != 0))
        throw std::invalid_argument("an extent of " + std::to_string(one.nbytes) + " bytes at " +
                                    std::to_string(one.offset) +
                                    " is not what the record needs: " + std::to_string(wanted) + " bytes");
      if (one.offset < 0 || one.offset + one.nbytes > files_->nbytes(one.file))
        throw std::invalid_argument(files_->path(one.file) + " ends before its experts do: it is damaged");
      layer.extents.push_back(one);
    }
  }
  layer.pieces = pieces_of(parts, record_nbytes, is_as_in_memory);
  layer.parts = std::move(parts);
  layer.record_nbytes = record_nbytes;
  layer.num_experts = static_cast<int64_t>(extents.size());
  layer.first_record = num_records_;
  find_probed(layer);
  num_records_ += layer.num_experts;
  layers_.push_back(std::move(layer));
  return static_cast<int64_t>(layers_.size()) - 1;
}

void ExpertStore::find_probed(Layer& layer) const {
  const auto is_alike = [&](const Layer& other) {
    const auto is_same = [](const RecordPart& a, const RecordPart& b) {
      return a.view.type == b.view.type && a.view.rows == b.view.rows && a.view.cols == b.view.cols &&
             a.view.tile_bytes == b.view.tile_bytes && a.view.wants_bf16 == b.view.wants_bf16 && a.offset == b.offset;
    };
    return other.record_nbytes == layer.record_nbytes && other.num_experts == layer.num_experts &&
           std::equal(other.parts.begin(), other.parts.end(), layer.parts.begin(), layer.parts.end(), is_same);
  };
  const auto found = std::find_if(layers_.begin(), layers_.end(), is_alike);
  layer.first_probed = found == layers_.end() ? layer.first_record : found->first_record;
  layer.num_probed = std::min(kProbed, layer.num_experts);
}

int64_t ExpertStore::record_of(const Layer& layer, int64_t expert) const {
  return is_probed_ ? layer.first_probed + expert % layer.num_probed : layer.first_record + expert;
}

void ExpertStore::make_pools(int64_t budget_nbytes, int64_t top_k) {
  for (Layer& layer : layers_) {
    const auto same = [&](const Pool& pool) { return pool.nbytes == layer.record_nbytes; };
    const auto found = std::find_if(pools_.begin(), pools_.end(), same);
    layer.pool = static_cast<size_t>(found - pools_.begin());
    if (found == pools_.end()) {
      pools_.emplace_back();
      pools_.back().nbytes = layer.record_nbytes;
    }
    pools_[layer.pool].num_records += layer.num_experts;
  }
  // What each must have; the rest is divided as what is lacking is.
  double lacking = 0;
  int64_t least = 0;
  for (Pool& pool : pools_) {
    const int64_t wave = std::clamp(kWaveBytes / pool.nbytes, kLeastWave, kMostWave);
    pool.max_guests = std::max<int64_t>(2, std::min(2 * wave, pool.num_records / kGuestShare));
    pool.num_slots = std::min(pool.num_records, top_k + pool.max_guests);
    least += pool.num_slots * pool.nbytes;
    lacking += static_cast<double>((pool.num_records - pool.num_slots) * pool.nbytes);
  }
  if (budget_nbytes < least)
    throw StoreTooSmall(mebibytes(budget_nbytes) + " for experts are too few: the " + std::to_string(top_k) +
                        " of a token and those that are read meanwhile take " + mebibytes(least));
  const double share = lacking > 0 ? std::min(1.0, static_cast<double>(budget_nbytes - least) / lacking) : 0;
  int64_t first = 0;
  for (Pool& pool : pools_) {
    pool.num_slots += static_cast<int64_t>(share * static_cast<double>(pool.num_records - pool.num_slots));
    pool.first_slot = first;
    first += pool.num_slots;
    stats_.slot_nbytes += pool.num_slots * pool.nbytes;
  }
  stats_.num_slots = first;
  stats_.num_records = num_records_;
}

void ExpertStore::open(int64_t budget_nbytes, int64_t top_k) {
  if (is_open_ || is_closed_ || layers_.empty())
    throw std::invalid_argument("a store is opened once, when it has all of its layers");
  if (top_k < 1) throw std::invalid_argument("top_k must be at least 1");
  pools_.clear();
  stats_ = {};
  make_pools(budget_nbytes, top_k);
  memory_ = std::make_unique<Pages>(stats_.slot_nbytes);
  slots_.resize(static_cast<size_t>(stats_.num_slots));
  uint8_t* data = memory_->data();
  for (Pool& pool : pools_) {
    for (int64_t slot = pool.first_slot; slot < pool.first_slot + pool.num_slots; ++slot, data += pool.nbytes)
      slots_[static_cast<size_t>(slot)].data = data;
    for (int64_t slot = pool.first_slot + pool.num_slots; slot-- > pool.first_slot;)
      pool.empty.push_back(static_cast<int32_t>(slot));
  }
  slot_of_.assign(static_cast<size_t>(num_records_), -1);
  scores_ = std::make_unique<ExpertScores>(num_records_);
  int64_t room = 0;
  for (const Layer& layer : layers_)
    for (const Piece& piece : layer.pieces)
      if (piece.part >= 0) room = std::max(room, piece.nbytes);
  reader_ = std::make_unique<Reader>(
      *files_, kernels_, num_threads_, stats_.num_slots, room,
      [this](int32_t slot, const std::string& error) { done(slot, error); }, [this] { return fill_next(); });
  is_open_ = true;
}

void ExpertStore::close() {
  if (is_forked()) {  // its threads are not here
    static_cast<void>(reader_.release());
    static_cast<void>(shared_.release());
    shared_ = std::make_unique<Shared>();
    is_closed_ = true;
    return;
  }
  {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    is_closed_ = true;
    shared_->changed.notify_all();
    shared_->changed.wait(lock, [&] { return num_visits_ == 0; });
  }
  if (reader_ != nullptr) reader_->close();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (reader_ != nullptr) stats_.bytes_read = reader_->bytes_read();
  reader_.reset();
  files_.reset();
  memory_.reset();
}

const ExpertStore::Layer& ExpertStore::layer_of(int64_t record) const {
  const auto after = std::upper_bound(layers_.begin(), layers_.end(), record,
                                      [](int64_t r, const Layer& layer) { return r < layer.first_record; });
  return *(after - 1);
}

void ExpertStore::find_victims(const Pool& pool, int64_t count, Among among, Victims& found) const {
  found.clear();
  if (count == 0) return;
  for (int64_t at = pool.first_slot; at < pool.first_slot + pool.num_slots; ++at) {
    const Slot& slot = slots_[static_cast<size_t>(at)];
    if (slot.state != State::Ready || slot.pins > 0) continue;
    if (among != Among::All && slot.is_guest != (among == Among::Guests)) continue;
    const std::pair<double, int64_t> one = {scores_->worth(slot.record), slot.record};
    if (static_cast<int64_t>(found.size()) == count) {
      if (!(one < found.front())) continue;
      std::pop_heap(found.begin(), found.end());
      found.pop_back();
    }
    found.push_back(one);
    std::push_heap(found.begin(), found.end());
  }
  std::sort_heap(found.begin(), found.end());
}

int32_t ExpertStore::take_empty(Pool& pool) {
  const int32_t slot = pool.empty.back();
  pool.empty.pop_back();
  return slot;
}

int32_t ExpertStore::take_from(Pool& pool, int64_t record) {
  const int32_t slot = slot_of_[static_cast<size_t>(record)];
  slot_of_[static_cast<size_t>(record)] = -1;
  set_guest(pool, slots_[static_cast<size_t>(slot)], false);
  return slot;
}

void ExpertStore::set_guest(Pool& pool, Slot& slot, bool is_guest) {
  pool.num_guests += static_cast<int64_t>(is_guest) - static_cast<int64_t>(slot.is_guest);
  slot.is_guest = is_guest;
}

void ExpertStore::begin_read(int32_t at, int64_t record) {
  Slot& slot = slots_[static_cast<size_t>(at)];
  const Layer& layer = layer_of(record);
  slot.record = record;
  slot.state = State::Reading;
  slot_of_[static_cast<size_t>(record)] = at;
  const size_t first = static_cast<size_t>(record - layer.first_record) * layer.per_expert;
  const ReadRequest request{&layer.parts, &layer.pieces, &layer.extents[first], slot.data};
  if (slot.is_filled)
    reader_->enqueue_behind(at, request);
  else
    reader_->enqueue(at, request);
}

// The slot, whose read failed, is empty from now on.
void ExpertStore::clear(int32_t at) {
  Slot& slot = slots_[static_cast<size_t>(at)];
  Pool& pool = pools_[layer_of(slot.record).pool];
  set_guest(pool, slot, false);
  errors_.erase(at);
  slot.record = -1;
  slot.state = State::Empty;
  pool.empty.push_back(at);
}

void ExpertStore::unpin(int32_t at) {
  Slot& slot = slots_[static_cast<size_t>(at)];
  if (--slot.pins == 0 && slot.state == State::Failed) clear(at);
}

void ExpertStore::done(int32_t at, const std::string& error) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Slot& slot = slots_[static_cast<size_t>(at)];
  slot.state = error.empty() ? State::Ready : State::Failed;
  if (slot.is_filled) {
    --num_filling_;
    stats_.num_filled += error.empty() ? 1 : 0;
    if (!error.empty()) fill_at_ = fill_order_.size();  // others would fail, too; a call says why
  }
  slot.is_filled = false;
  if (!error.empty()) {
    ++stats_.read_errors;
    errors_[at] = error;
    slot_of_[static_cast<size_t>(slot.record)] = -1;
    if (slot.pins == 0) clear(at);
  }
  shared_->changed.notify_all();
}

void ExpertStore::fill(const std::vector<double>& scores, bool wait) {
  if (is_forked()) throw std::runtime_error("this ExpertStore was made before fork() and has no threads here");
  std::unique_lock<std::mutex> lock(shared_->mutex);
  check_open();
  if (!scores.empty()) {
    if (static_cast<int64_t>(scores.size()) != num_records_)
      throw std::invalid_argument(std::to_string(scores.size()) + " scores are not of " + std::to_string(num_records_) +
                                  " records");
    scores_->start(scores);
  }
  const std::vector<double> known = scores_->remembered();
  fill_order_.resize(static_cast<size_t>(num_records_));
  std::iota(fill_order_.begin(), fill_order_.end(), int64_t{0});
  const auto expert = [&](int64_t record) { return record - layer_of(record).first_record; };
  std::sort(fill_order_.begin(), fill_order_.end(), [&](int64_t a, int64_t b) {
    const double x = known[static_cast<size_t>(a)], y = known[static_cast<size_t>(b)];
    if (x != y) return x > y;
    return std::make_pair(expert(a), a) < std::make_pair(expert(b), b);
  });
  fill_at_ = 0;
  reader_->work_when_idle();
  if (!wait) return;
  shared_->changed.wait(lock, [&] { return is_closed_ || (fill_at_ == fill_order_.size() && num_filling_ == 0); });
}

void ExpertStore::probe(bool is_on) {
  check_owner();
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return num_visits_ == 0; });
  check_open();
  for (size_t at = 0; is_probed_ && !is_on && at < slots_.size(); ++at) {
    const Slot& slot = slots_[at];
    if (slot.state != State::Ready || slot.pins > 0) continue;
    slot_of_[static_cast<size_t>(slot.record)] = -1;
    clear(static_cast<int32_t>(at));
  }
  is_probed_ = is_on;
}

// By a thread of the reader that has nothing else to do.
bool ExpertStore::fill_next() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  while (!is_closed_ && fill_at_ < fill_order_.size()) {
    const int64_t record = fill_order_[fill_at_++];
    Pool& pool = pools_[layer_of(record).pool];
    if (slot_of_[static_cast<size_t>(record)] >= 0 || pool.empty.empty()) continue;
    const int32_t slot = take_empty(pool);
    slots_[static_cast<size_t>(slot)].is_filled = true;
    ++num_filling_;
    begin_read(slot, record);
    return true;
  }
  shared_->changed.notify_all();
  return false;
}

StoreStats ExpertStore::stats() {
  if (is_forked()) return stats_;  // somebody may have held the mutex
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (reader_ != nullptr) stats_.bytes_read = reader_->bytes_read();
  return stats_;
}

std::pair<int64_t, std::string> ExpertStore::take_retried() {
  if (is_forked()) return {};
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return files_ == nullptr ? std::pair<int64_t, std::string>() : files_->take_retried();
}

std::vector<double> ExpertStore::scores() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return scores_ == nullptr ? std::vector<double>(static_cast<size_t>(num_records_)) : scores_->remembered();
}

std::vector<std::pair<int64_t, int64_t>> ExpertStore::held() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const Slot& slot : slots_) {
    if (slot.state != State::Ready) continue;
    const Layer& layer = layer_of(slot.record);
    found.emplace_back(&layer - layers_.data(), slot.record - layer.first_record);
  }
  return found;
}

}  // namespace kt
