// Rows of a table that lies in files, of which a step needs few: they are read as records of experts are (reader.h),
// and those that were looked up last stay in memory.
//
// A row has some hundred bytes and costs a sector of the disk; its neighbours are of other texts, so rows are kept and
// not sectors. All rows of a call that are not there are asked for at once. What is kept is in sets of kWays: a row's
// number says in which set it may be, and the row of the set that was looked up longest ago leaves.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/store/reader.h"

namespace kt {

// hits: rows that were in memory when they were asked for, or asked for already; misses: rows that were read.
// bytes_read: whole sectors.
struct RowStats { int64_t hits = 0, misses = 0, bytes_read = 0, waited_ns = 0, read_errors = 0; };

class RowStore {
 public:
  static constexpr int kThreads = 32;  // a sector is waited for, not worked for
  static constexpr int64_t kWays = 8;
  static constexpr int64_t kBatch = 4096;  // rows that are asked for at once, at most

  // row: one row of the table, without data. parts: where its rows lie, in their order. cache_nbytes: of rows that
  // stay, with what is noted of them. Throws std::runtime_error for a file that cannot be opened,
  // std::invalid_argument for parts that are not whole rows of the files.
  RowStore(const std::vector<std::string>& paths, const KernelTable& kernels, const WeightView& row,
           std::vector<Extent> parts, int64_t cache_nbytes);
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // out: fp32 [count, cols]. Waits for rows that are not in memory. Throws ReadError, and std::out_of_range before any
  // work.
  void gather(WorkerPool& pool, const int64_t* ids, int64_t count, float* out);
  // Ends the threads, once no call is under way; calls that wait, and later ones, throw. Closing twice is fine.
  void close();

  RowStats stats();
  std::pair<int64_t, std::string> take_retried();  // see StoreFiles
  bool is_direct(int32_t file) const { return files_->is_direct(file); }
  Reader& reader() { return *reader_; }  // of one that is not closed

 private:
  struct Wanted {
    int64_t row, place;  // place: in the batch
    bool operator<(const Wanted& other) const { return row != other.row ? row < other.row : place < other.place; }
  };
  void check_open() const;
  uint8_t* in_batch(int64_t place) { return batch_.data() + place * row_bytes_; }
  int64_t first_of_set(int64_t row) const;
  Extent extent_of(int64_t row) const;
  void fetch(WorkerPool& pool, const int64_t* ids, int64_t count);
  void read_wanted(WorkerPool& pool);
  void keep(int64_t row, const uint8_t* data);
  void done(const std::string& error);

  const int64_t owner_pid_;
  std::unique_ptr<StoreFiles> files_;
  const std::vector<RecordPart> as_record_;  // a row
  const std::vector<Piece> pieces_;          // of a row
  const std::vector<Extent> parts_;
  const int64_t row_bytes_, num_sets_;
  std::vector<int64_t> firsts_;  // rows of the parts before each
  int64_t num_rows_ = 0;

  // A condition variable's waiters are not there in a forked child, which leaks it.
  struct Shared {
    std::mutex calls;  // one at a time: guards the batch and what is kept
    std::mutex mutex;  // guards the next members
    std::condition_variable changed;
  };
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  int64_t num_left_ = 0;  // reads of the batch
  std::string error_;     // the first one of the batch
  bool is_closed_ = false;
  RowStats stats_;

  std::vector<uint8_t> batch_;          // [kBatch][row_bytes]
  std::vector<int64_t> places_;         // 0 .. kBatch - 1
  std::vector<Wanted> wanted_;          // rows of the batch that are not kept, in the order of the table
  std::vector<Extent> extents_;         // of the batch's reads,
  std::vector<uint8_t*> destinations_;  // and where in the batch they go
  std::unique_ptr<Pages> kept_;         // [sets][kWays][row_bytes]
  std::vector<int64_t> kept_rows_;      // -1: none
  std::vector<uint32_t> last_called_;   // number of the batch that looked it up
  uint32_t num_batches_ = 0;
  std::unique_ptr<Reader> reader_;
};

}  // namespace kt
