// Reads records of files into memory, past the system's cache, with threads that mostly sleep in the system.
//
// A record is one expert of one layer: one extent of a file that holds it as it lies in memory, or one extent for each
// of its matrices, in block layout, which are packed on the way. It is read in pieces of about 1 MiB, so that a single
// record keeps several threads and the disk's queue busy.
//
// What is enqueued `behind` is read while nobody waits for the disk: when nothing else is queued, and nothing else was
// for a while (kQuietNs). At most one piece a thread of it is then in the way of what comes.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <thread>
#include <vector>

#include "ops/weights/weights.h"

namespace kt {

constexpr int64_t kDiskBlock = 4096;  // what O_DIRECT wants offsets, sizes and addresses to be multiples of, at most

// What is in a file cannot be read now; it is tried again when it is asked for again.
class ReadError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bytes of a file.
struct Extent {
  int32_t file;
  int64_t offset, nbytes;
};

// A matrix of a record; view: without data.
struct RecordPart {
  WeightView view;
  int64_t offset;  // in the record
};

// Rows `first_row` on of matrix `part`, or bytes of a record that lies in the file as in memory (part -1).
struct Piece {
  int part;
  int64_t first_row, num_rows;
  int64_t from, nbytes;  // in the part's extent
  int64_t to;            // in the record
};
std::vector<Piece> pieces_of(const std::vector<RecordPart>& parts, int64_t record_nbytes, bool is_as_in_memory);

// Memory of its own pages, which a forked child does not get: a fork while the disk writes to pages that both have
// would let the result go to the wrong one.
class Pages {
 public:
  // In huge pages where the system gives them: a request to a disk takes 256 small ones or so. Throws std::bad_alloc.
  explicit Pages(int64_t nbytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  const int64_t nbytes_, owner_pid_;
};

// Open files, which stay readable when somebody deletes them.
class StoreFiles {
 public:
  // Throws std::runtime_error that names the file.
  explicit StoreFiles(const std::vector<std::string>& paths);
  ~StoreFiles();
  StoreFiles(const StoreFiles&) = delete;
  StoreFiles& operator=(const StoreFiles&) = delete;

  int64_t count() const { return static_cast<int64_t>(files_.size()); }
  int64_t nbytes(int32_t file) const { return files_[static_cast<size_t>(file)].nbytes; }
  bool is_direct(int32_t file) const { return files_[static_cast<size_t>(file)].is_direct; }
  const std::string& path(int32_t file) const { return files_[static_cast<size_t>(file)].path; }

  // Returns where in `room` the bytes are: at its beginning if the offset is a multiple of kDiskBlock. room: aligned to
  // kDiskBlock, of room_for(nbytes) bytes or, if offset and size are multiples too, of nbytes. Throws
  // std::runtime_error that names the file and says what happened: it cannot be read, ends too early, or is not what it
  // was when it was opened. What may pass, an I/O error or nothing that comes, is tried again kMoreTries times.
  const uint8_t* read(const Extent& extent, uint8_t* room) const;
  // How many reads were tried again since the last call, and what was wrong with the last one of them.
  std::pair<int64_t, std::string> take_retried() const;
  // Bytes of the blocks in which an extent lies, which is what a disk reads.
  static int64_t disk_bytes(const Extent& extent);
  static int64_t room_for(int64_t nbytes) { return (nbytes + 2 * kDiskBlock - 1) / kDiskBlock * kDiskBlock; }

 private:
  struct File {
    std::string path;
    int fd;
    int64_t nbytes, mtime_ns;
    bool is_direct;
  };
  static constexpr int kMoreTries = 2;
  void check_unchanged(const File& file) const;
  std::vector<File> files_;
  mutable std::mutex mutex_;  // guards what was tried again
  mutable std::pair<int64_t, std::string> retried_;
};

// One record to be read.
struct ReadRequest {
  const std::vector<RecordPart>* parts = nullptr;
  const std::vector<Piece>* pieces = nullptr;
  const Extent* extents = nullptr;  // of the record, or of each part
  uint8_t* to = nullptr;
};

class Reader {
 public:
  // done(slot, error): the request of a slot is over; error: empty if all is well. idle(): nothing is queued and nobody
  // waits; returns whether it has enqueued something behind. Both are called by the threads. slots: of requests, of
  // which each has one at a time. room: bytes of the largest piece that is not read to its place.
  Reader(const StoreFiles& files, const KernelTable& kernels, int num_threads, int64_t slots, int64_t room,
         std::function<void(int32_t, const std::string&)> done, std::function<bool()> idle);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // In the order of the calls. wake: afterwards, once for several.
  void enqueue(int32_t slot, const ReadRequest& request);
  void wake() { wake_.notify_all(); }
  // By idle() alone.
  void enqueue_behind(int32_t slot, const ReadRequest& request);
  // Somebody waits for it now, if it was enqueued behind.
  void hurry(int32_t slot);
  // From now on idle() is called until it has nothing.
  void work_when_idle();
  // Ends the threads after the pieces that they are in; what is queued is forgotten.
  void close();

  int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

  // For tests: threads begin no piece while held, but `count` more; the next `count` pieces cannot be read; a piece is
  // read up to `times` times, as on a disk that is now fast and now slow; what takes the place of kQuietNs.
  void hold(bool is_held);
  void pass(int64_t count);
  void set_quiet(int64_t ns);
  void fail_next(int count) { failing_.store(count); }
  void slow_down(int times) { slowness_.store(times); }

 private:
  struct Request : ReadRequest {
    size_t next = 0, left = 0;  // pieces: to begin with, and to be done
    std::string error;
  };
  static constexpr int64_t kQuietNs = 20'000'000;
  void main(int thread);
  void put(int32_t slot, const ReadRequest& request);
  void push(int32_t slot);
  void drop(int32_t slot);
  int32_t next_slot() const;
  bool is_quiet() const;
  void wait_for_work(std::unique_lock<std::mutex>& lock);
  void read_piece(const Request& request, const Piece& piece, uint8_t* room);

  const StoreFiles& files_;
  const KernelTable& kernels_;
  const std::function<void(int32_t, const std::string&)> done_;
  const std::function<bool()> idle_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Request> requests_;  // of each slot
  std::vector<int32_t> queue_;     // a ring of slots
  size_t head_ = 0, num_queued_ = 0;
  int32_t behind_ = -1;  // the slot whose request is enqueued behind, of which some piece has not begun
  int64_t quiet_ns_ = kQuietNs, quiet_from_ = 0, num_passes_ = 0;
  bool is_held_ = false, wants_idle_ = false, is_closed_ = false;
  std::atomic<int64_t> bytes_read_{0};
  std::atomic<int> failing_{0}, slowness_{1};
  const int64_t room_;  // of each thread
  std::unique_ptr<Pages> rooms_;
  std::vector<std::thread> threads_;
};

}  // namespace kt
