// See files.h.
#include "runtime/files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>

#include <fcntl.h>
#include <unistd.h>

namespace kt {
namespace {

struct File {
  int64_t bytes;
  int fd;
};

std::shared_mutex g_mutex;
std::map<uintptr_t, File> g_files;  // by the first address

uintptr_t address_of(const uint8_t* data) { return reinterpret_cast<uintptr_t>(data); }

// The file that holds all of the bytes, and where in it they begin; fd -1: none does.
struct Place {
  int fd;
  int64_t offset;
};

Place place_of(const uint8_t* data, int64_t bytes) {
  const std::shared_lock<std::shared_mutex> lock(g_mutex);
  auto next = g_files.upper_bound(address_of(data));
  if (next == g_files.begin()) return {-1, 0};
  --next;
  const int64_t offset = static_cast<int64_t>(address_of(data) - next->first);
  return offset + bytes <= next->second.bytes ? Place{next->second.fd, offset} : Place{-1, 0};
}

}  // namespace

void note_file(const uint8_t* data, int64_t bytes, int fd) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw std::runtime_error(std::string("a file cannot be opened: ") + std::strerror(errno));
  const std::unique_lock<std::shared_mutex> lock(g_mutex);
  const auto [at, is_new] = g_files.insert({address_of(data), File{bytes, own}});
  if (is_new) return;
  close(at->second.fd);  // of a map that was let go of without saying so
  at->second = File{bytes, own};
}

void forget_file(const uint8_t* data) {
  const std::unique_lock<std::shared_mutex> lock(g_mutex);
  const auto at = g_files.find(address_of(data));
  if (at == g_files.end()) return;
  close(at->second.fd);
  g_files.erase(at);
}

const uint8_t* read_once(const uint8_t* data, int64_t bytes, uint8_t* room) {
  const Place place = place_of(data, bytes);
  if (place.fd < 0) return data;
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(place.fd, room + done, static_cast<size_t>(bytes - done), place.offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::runtime_error(std::string("a file of weights cannot be read: ") + std::strerror(errno));
    if (got == 0) throw std::runtime_error("a file of weights has become shorter while it was read; load it again");
    done += got;
  }
  return room;
}

void drop_cached(const uint8_t* data, int64_t bytes) {
#if defined(POSIX_FADV_DONTNEED)
  const Place place = place_of(data, 1);  // the last page may end behind the file
  if (place.fd >= 0) static_cast<void>(posix_fadvise(place.fd, place.offset, bytes, POSIX_FADV_DONTNEED));
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace kt
