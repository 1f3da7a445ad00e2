// See reader.h.
#include "ops/store/reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kt {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

int64_t block_of(int64_t offset) { return offset / kDiskBlock * kDiskBlock; }

std::string reason() { return std::strerror(errno); }

// Whether a read that failed so may succeed at the next try: a cable, a network, a signal.
bool may_pass(int error) { return error == EIO || error == EINTR || error == EAGAIN || error == ETIMEDOUT; }

int64_t mtime_of(const struct stat& about) {
#if defined(__APPLE__)
  const timespec& time = about.st_mtimespec;
#else
  const timespec& time = about.st_mtim;
#endif
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// -1: the file system has no such reads, or says so when one is tried.
int open_direct(const std::string& path) {
#if defined(O_DIRECT)
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (fd < 0) return -1;
  const Pages room(kDiskBlock);
  if (pread(fd, room.data(), static_cast<size_t>(kDiskBlock), 0) >= 0) return fd;
  close(fd);
#else
  static_cast<void>(path);
#endif
  return -1;
}

}  // namespace

std::vector<Piece> pieces_of(const std::vector<RecordPart>& parts, int64_t record_nbytes, bool is_as_in_memory) {
  std::vector<Piece> pieces;
  if (is_as_in_memory) {
    for (int64_t at = 0; at < record_nbytes; at += kPiece)
      pieces.push_back({-1, 0, 0, at, std::min(kPiece, record_nbytes - at), at});
    return pieces;
  }
  for (size_t part = 0; part < parts.size(); ++part) {
    const WeightView& view = parts[part].view;
    const int64_t tiles = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, kTileRows * view.row_bytes)),
                  rows = tiles * kTileRows;
    for (int64_t first = 0; first < view.rows; first += rows) {
      const int64_t some = std::min(rows, view.rows - first);
      const int64_t to = view.tile_bytes == 0 ? first * view.row_bytes : first / kTileRows * view.tile_bytes;
      pieces.push_back({static_cast<int>(part), first, some, first * view.row_bytes, some * view.row_bytes,
                        parts[part].offset + to});
    }
  }
  return pieces;
}

Pages::Pages(int64_t nbytes) : nbytes_(round_up(nbytes, kHugePage)), owner_pid_(getpid()) {
  void* const made =
      mmap(nullptr, static_cast<size_t>(nbytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(made);
#if defined(__linux__)
  const auto size = static_cast<size_t>(nbytes_);
  static_cast<void>(madvise(made, size, MADV_DONTFORK));
  static_cast<void>(madvise(made, size, MADV_DONTDUMP));
  static_cast<void>(madvise(made, size, MADV_HUGEPAGE));
#endif
}

Pages::~Pages() {
  if (getpid() == owner_pid_) munmap(data_, static_cast<size_t>(nbytes_));
}

StoreFiles::StoreFiles(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    int fd = open_direct(path);
    const bool is_direct = fd >= 0;
    if (!is_direct) fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about{};
    if (fd < 0 || fstat(fd, &about) != 0) {
      const std::string why = reason();
      if (fd >= 0) close(fd);
      for (const File& file : files_) close(file.fd);
      throw std::runtime_error(path + " cannot be opened: " + why);
    }
    files_.push_back({path, fd, static_cast<int64_t>(about.st_size), mtime_of(about), is_direct});
  }
}

StoreFiles::~StoreFiles() {
  for (const File& file : files_) close(file.fd);
}

void StoreFiles::check_unchanged(const File& file) const {
  struct stat about{};
  if (fstat(file.fd, &about) != 0) throw std::runtime_error(file.path + " cannot be read: " + reason());
  const auto nbytes = static_cast<int64_t>(about.st_size);
  if (nbytes != file.nbytes)
    throw std::runtime_error(file.path + " has " + std::to_string(nbytes) + " bytes and had " +
                             std::to_string(file.nbytes) +
                             " when it was opened: put it back as it was, or load the model again");
  if (mtime_of(about) != file.mtime_ns)
    throw std::runtime_error(file.path +
                             " was written to since it was opened: put it back as it was (the time of its last change "
                             "too), or load the model again");
}

std::pair<int64_t, std::string> StoreFiles::take_retried() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(retried_, {});
}

int64_t StoreFiles::disk_bytes(const Extent& extent) {
  return round_up(extent.offset + extent.nbytes - block_of(extent.offset), kDiskBlock);
}

const uint8_t* StoreFiles::read(const Extent& extent, uint8_t* room) const {
  const File& file = files_[static_cast<size_t>(extent.file)];
  const int64_t begin = block_of(extent.offset), needed = extent.offset + extent.nbytes - begin,
                wanted = disk_bytes(extent);
  int tries = kMoreTries;
  for (int64_t done = 0; done < needed;) {
    const ssize_t got = pread(file.fd, room + done, static_cast<size_t>(wanted - done), begin + done);
    const bool passes = got >= 0 || may_pass(errno);
    const int64_t next = got < 0 ? done : done + got >= needed ? done + got : block_of(done + got);
    if (next > done) {
      done = next;
      continue;
    }
    const std::string why =
        file.path + " cannot be read at " + std::to_string(begin + done) + ": " +
        (got < 0 ? reason() : "only " + std::to_string(got) + " bytes of " + std::to_string(needed - done) + " came");
    if (got >= 0) check_unchanged(file);
    if (!passes || tries-- == 0) throw std::runtime_error(why);
    const std::lock_guard<std::mutex> lock(mutex_);
    retried_ = {retried_.first + 1, why};
  }
#if defined(POSIX_FADV_DONTNEED)
  if (!file.is_direct) static_cast<void>(posix_fadvise(file.fd, begin, wanted, POSIX_FADV_DONTNEED));
#endif
  check_unchanged(file);  // behind the read: whoever writes sets the time first
  return room + (extent.offset - begin);
}

Reader::Reader(const StoreFiles& files, const KernelTable& kernels, int num_threads, int64_t slots, int64_t room,
               std::function<void(int32_t, const std::string&)> done, std::function<bool()> idle)
    : files_(files),
      kernels_(kernels),
      done_(std::move(done)),
      idle_(std::move(idle)),
      requests_(static_cast<size_t>(slots)),
      queue_(static_cast<size_t>(slots)),
      room_(StoreFiles::room_for(room)) {
  if (room > 0) rooms_ = std::make_unique<Pages>(num_threads * room_);
  const BlockedSignals blocked;
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this, i] { main(i); });
  } catch (...) {
    close();
    throw;
  }
}

Reader::~Reader() { close(); }

void Reader::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Reader::put(int32_t slot, const ReadRequest& request) {
  Request& to = requests_[static_cast<size_t>(slot)];
  static_cast<ReadRequest&>(to) = request;
  to.next = 0;
  to.left = request.pieces->size();
  to.error.clear();
}

void Reader::push(int32_t slot) {
  queue_[(head_ + num_queued_++) % queue_.size()] = slot;
  quiet_from_ = steady_ns() + quiet_ns_;
}

// A request of which no more pieces are to be begun.
void Reader::drop(int32_t slot) {
  if (slot == behind_) {
    behind_ = -1;
    return;
  }
  if (num_queued_ > 0 && queue_[head_] == slot) {
    head_ = (head_ + 1) % queue_.size();
    --num_queued_;
    return;
  }
  size_t kept = 0;
  for (size_t i = 0; i < num_queued_; ++i) {
    const int32_t one = queue_[(head_ + i) % queue_.size()];
    if (one != slot) queue_[(head_ + kept++) % queue_.size()] = one;
  }
  num_queued_ = kept;
}

void Reader::enqueue(int32_t slot, const ReadRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  put(slot, request);
  push(slot);
}

void Reader::enqueue_behind(int32_t slot, const ReadRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  put(slot, request);
  behind_ = slot;
}

void Reader::hurry(int32_t slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (slot != behind_) return;
    behind_ = -1;
    push(slot);
  }
  wake_.notify_all();
}

void Reader::work_when_idle() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wants_idle_ = true;
  }
  wake_.notify_all();
}

void Reader::hold(bool is_held) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = is_held;
  }
  wake_.notify_all();
}

void Reader::pass(int64_t count) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_passes_ = count;
  }
  wake_.notify_all();
}

void Reader::set_quiet(int64_t ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  quiet_ns_ = ns;
}

// The slot whose next piece is to be read; -1: none.
int32_t Reader::next_slot() const { return num_queued_ > 0 ? queue_[head_] : behind_; }

bool Reader::is_quiet() const { return steady_ns() >= quiet_from_; }

// Returns when something is to be read now, or idle() to be asked, or all is over.
void Reader::wait_for_work(std::unique_lock<std::mutex>& lock) {
  while (!is_closed_) {
    const bool may_begin = !is_held_ || num_passes_ > 0, has_behind = behind_ >= 0 || wants_idle_;
    if (may_begin && (num_queued_ > 0 || (has_behind && is_quiet()))) return;
    if (may_begin && has_behind)
      wake_.wait_for(lock, std::chrono::nanoseconds(quiet_from_ - steady_ns()));
    else
      wake_.wait(lock);
  }
}

void Reader::main(int thread) {
  use_kernel_float_mode();
  uint8_t* const room = rooms_ == nullptr ? nullptr : rooms_->data() + thread * room_;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wait_for_work(lock);
    if (is_closed_) return;
    const int32_t slot = next_slot();
    if (slot < 0) {
      wants_idle_ = false;
      lock.unlock();
      if (idle_()) work_when_idle();
      lock.lock();
      continue;
    }
    if (is_held_) --num_passes_;
    Request& request = requests_[static_cast<size_t>(slot)];
    const size_t count = request.pieces->size();
    const Piece& piece = (*request.pieces)[request.next++];
    if (request.next == count) drop(slot);
    lock.unlock();
    std::string error;
    try {
      read_piece(request, piece, room);
    } catch (const std::exception& problem) { error = problem.what(); }
    lock.lock();
    if (!error.empty() && request.error.empty()) {
      request.error = std::move(error);
      if (request.next < count) {
        request.left -= count - request.next;
        request.next = count;
        drop(slot);
      }
    }
    if (--request.left > 0) continue;
    lock.unlock();
    done_(slot, request.error);  // nobody enqueues the slot before
    lock.lock();
  }
}

void Reader::read_piece(const Request& request, const Piece& piece, uint8_t* room) {
  Extent extent = request.extents[std::max(piece.part, 0)];
  extent.offset += piece.from;
  extent.nbytes = piece.nbytes;
  uint8_t* const to = request.to + piece.to;
  const auto read = [&](uint8_t* place) {
    if (failing_.load(std::memory_order_relaxed) > 0 && failing_.fetch_sub(1) > 0)
      throw std::runtime_error(files_.path(extent.file) + " cannot be read: a test says so");
    const int slowness = slowness_.load(std::memory_order_relaxed);
    for (int64_t i = slowness > 1 ? (extent.offset / kDiskBlock * 40503 >> 4) % slowness : 0; i > 0; --i)
      files_.read(extent, place);
    bytes_read_.fetch_add(StoreFiles::disk_bytes(extent), std::memory_order_relaxed);
    return files_.read(extent, place);
  };
  if (piece.part < 0) {
    read(to);
    return;
  }
  const RecordPart& part = (*request.parts)[static_cast<size_t>(piece.part)];
  WeightView some = part.view;
  some.data = read(room);
  some.rows = piece.num_rows;
  if (some.tile_bytes == 0)
    std::memcpy(to, some.data, static_cast<size_t>(piece.nbytes));
  else
    pack_rows(kernels_, some, to);
}

}  // namespace kt
