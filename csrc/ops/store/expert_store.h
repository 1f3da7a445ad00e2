// Experts of a model's layers that lie in files, with slots in memory for as many of them as fit.
//
//   Moe ── Visit: the experts of a call ──> ExpertStore ── ReadRequest ──> Reader ── threads ──> files
//       <── records that are there, in waves ──        <── done ──
//
// Records of one size share a pool of slots, over all layers. A slot is empty, being read into, or holds a record.
// What a call uses is pinned until it has computed with it. Which record leaves when one comes follows from their
// scores (scores.h) and not from the time that reads take, as far as a record that is still being read, or used, has
// to stay: timing decides on that alone, and never on a result.
//
// A call of as many rows as touch most experts of a layer (a prompt's) would throw out what decode needs. It replaces
// records only that are worth much less than what comes, and has the others read to a few slots of the pool in turn,
// those of guests.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/store/reader.h"
#include "ops/store/scores.h"

namespace kt {

// The budget is too small.
class StoreTooSmall : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// hits: experts of calls that were in memory when they were asked for, each once a call; misses: the others.
struct StoreStats {
  int64_t hits = 0, misses = 0, bytes_read = 0, waited_ns = 0, read_errors = 0;
  int64_t num_slots = 0, num_records = 0, num_filled = 0, slot_nbytes = 0;
};

class ExpertStore {
 public:
  // Throws std::runtime_error for a file that cannot be opened.
  ExpertStore(const std::vector<std::string>& paths, const KernelTable& kernels, int num_threads);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // Before `open`. extents: of each expert one, of the record as it lies in memory, or one of each part. Returns the
  // layer's number here; layers are called in the order of their numbers. Throws std::invalid_argument.
  int64_t add_layer(std::vector<RecordPart> parts, int64_t record_nbytes,
                    const std::vector<std::vector<Extent>>& extents);
  // Makes the slots. Throws StoreTooSmall when they hold less than the top_k experts of a token and the guests' slots
  // of each pool, std::bad_alloc.
  void open(int64_t budget_nbytes, int64_t top_k);
  // From now on, if is_on, calls use few records for all: expert e of any layer is expert e % kProbed of the first
  // layer whose records are alike. Such calls are no picks, and are counted nowhere; what they read leaves when they
  // are over. For steps that are compared with each other, or whose results nobody wants. Waits for calls that are
  // under way.
  void probe(bool is_on);
  // Reads records to empty slots, while no call needs the disk: those of the highest scores, and of equal ones as many
  // of each layer. scores: of an earlier time [records], or empty. wait: until that is over.
  void fill(const std::vector<double>& scores, bool wait);
  // Of records that are copied elsewhere. They are pinned as a call's are, at most max_held of a layer's pool at once,
  // so that calls find slots; none of this counts as a pick. The record, if it is in memory and may be held; null
  // otherwise. Never waits.
  const uint8_t* hold(int64_t layer, int64_t expert);
  // Reads distinct records, where they are not there, and holds all of them. Throws ReadError, and then holds none;
  // std::invalid_argument for more than may be held now.
  std::vector<const uint8_t*> read(int64_t layer, const std::vector<int64_t>& experts);
  // is_kept: whether the record stays in memory; otherwise its slot is empty, unless somebody else uses it. Throws
  // std::invalid_argument for one that is not held.
  void release(int64_t layer, int64_t expert, bool is_kept);
  int64_t max_held(int64_t layer) const { return pools_.at(layers_.at(static_cast<size_t>(layer)).pool).max_guests; }
  // All slots, from `open` to `close`.
  std::pair<const uint8_t*, int64_t> memory() const;
  // Ends the threads; later calls throw. Closing twice is fine. No call may be under way, and nothing held be read.
  void close();

  StoreStats stats();
  std::vector<double> scores();
  // (layer, expert) in slots, by slot; for tests.
  std::vector<std::pair<int64_t, int64_t>> held();
  std::pair<int64_t, std::string> take_retried();  // see StoreFiles
  bool is_direct(int32_t file) const { return files_->is_direct(file); }
  Reader& reader() { return *reader_; }  // of an open store

  int64_t num_experts(int64_t layer) const { return layers_.at(static_cast<size_t>(layer)).num_experts; }
  const std::vector<RecordPart>& parts(int64_t layer) const { return layers_.at(static_cast<size_t>(layer)).parts; }
  int64_t record_nbytes(int64_t layer) const { return layers_.at(static_cast<size_t>(layer)).record_nbytes; }

 private:
  friend class Visit;
  enum class State : uint8_t { Empty, Reading, Ready, Failed };
  struct Layer {
    std::vector<RecordPart> parts;
    std::vector<Piece> pieces;
    std::vector<Extent> extents;  // [experts][one or of each part]
    int64_t record_nbytes, num_experts, first_record;
    size_t per_expert;  // extents
    size_t pool = 0;
    int64_t first_probed = 0, num_probed = 1;  // records that stand for the layer's in probes
  };
  struct Slot {
    int64_t record = -1;
    uint8_t* data = nullptr;
    int32_t pins = 0, holds = 0;  // holds: of the pins, those of `hold` and `read`
    State state = State::Empty;
    bool is_guest = false, is_filled = false;  // is_filled: by `fill`, while it is read
  };
  struct Pool {
    int64_t nbytes = 0, num_records = 0;  // of a record; of all layers of the pool
    int64_t first_slot = 0, num_slots = 0;
    int64_t max_guests = 0, num_guests = 0, num_held = 0;  // num_held: by `hold` and `read`
    std::vector<int32_t> empty;                            // slots, the first one last
  };
  // Records whose slots may be taken, with what they are worth, those worth least first.
  using Victims = std::vector<std::pair<double, int64_t>>;
  enum class Among { All, Regulars, Guests };

  static constexpr int64_t kProbed = 8;

  void check_open() const;
  bool is_forked() const;
  void find_probed(Layer& layer) const;
  int64_t record_of(const Layer& layer, int64_t expert) const;
  const Layer& layer_of(int64_t record) const;
  void find_victims(const Pool& pool, int64_t count, Among among, Victims& found) const;
  int32_t take_empty(Pool& pool);
  int32_t take_from(Pool& pool, int64_t record);
  void set_guest(Pool& pool, Slot& slot, bool is_guest);
  void begin_read(int32_t slot, int64_t record);
  void unpin(int32_t slot);
  void check_owner() const;
  int64_t checked_record(int64_t layer, int64_t expert) const;
  void pin_held(Pool& pool, int32_t slot);
  void unpin_held(Pool& pool, int32_t slot);
  bool acquire_held(Pool& pool, int64_t record);
  void clear(int32_t slot);
  void done(int32_t slot, const std::string& error);
  bool fill_next();
  void make_pools(int64_t budget_nbytes, int64_t top_k);

  const int64_t owner_pid_;
  std::unique_ptr<StoreFiles> files_;
  const KernelTable& kernels_;
  const int num_threads_;
  std::vector<Layer> layers_;
  int64_t num_records_ = 0;
  std::unique_ptr<Pages> memory_;

  // Guards all below. A condition variable's waiters are not there in a forked child, which leaks it.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
  };
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  bool is_open_ = false, is_closed_ = false, is_probed_ = false;
  std::vector<Pool> pools_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;           // of each record, or -1
  std::map<int32_t, std::string> errors_;  // of slots that failed
  std::unique_ptr<ExpertScores> scores_;
  int64_t last_layer_ = -1, num_visits_ = 0;
  std::vector<int64_t> fill_order_;
  size_t fill_at_ = 0;
  int64_t num_filling_ = 0;
  Victims found_, guests_;  // memory of a search
  StoreStats stats_;
  std::unique_ptr<Reader> reader_;
};

// An expert of a call.
struct Visited {
  int32_t expert = 0, slot = -1;
  bool was_there = false, is_own = false, is_done = false;  // is_own: read for this call
};

// One call of a layer. Holds what it has not computed yet.
class Visit {
 public:
  // experts: distinct. num_pairs: (row, expert) of the call.
  // is_more: of the same call as the visit of the layer before.
  Visit(ExpertStore& store, int64_t layer, Span<Visited> experts, int64_t num_pairs, bool is_more);
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  int64_t num_left() const { return num_left_; }
  // Sets places in `experts` that are to be computed now; there may be none yet. Throws ReadError.
  void take(Span<int32_t>& chosen);
  // Until `take` finds something. Throws ReadError.
  void wait();
  // They are computed.
  void finish(Span<int32_t> chosen);
  const uint8_t* record(int64_t place) const;

 private:
  using State = ExpertStore::State;
  void acquire(bool is_first);
  bool join(Visited& one);
  bool is_ready(const Visited& one) const;
  void check();
  ExpertStore& store_;
  const ExpertStore::Layer& layer_;
  ExpertStore::Pool* pool_ = nullptr;
  const Span<Visited> experts_;
  const bool is_stream_;
  int64_t num_left_, num_held_ = 0, num_lacking_ = 0;  // without a slot
};

}  // namespace kt
