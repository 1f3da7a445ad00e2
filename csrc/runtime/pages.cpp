// See pages.h.
#include "runtime/pages.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace kt {

#if defined(__linux__)
namespace {

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14, which older headers lack
constexpr uintptr_t kPage = 4096;
// However much is asked for, the system reads what its device takes at once (max_sectors_kb, or read_ahead_kb if that
// is more); and a request that is split into many costs more of its time.
constexpr uintptr_t kReadAhead = 512 << 10;

uintptr_t page_of(const uint8_t* data) { return reinterpret_cast<uintptr_t>(data) / kPage * kPage; }

}  // namespace

void map_pages(const uint8_t* data, int64_t bytes) {
  static std::atomic<bool> is_known{true};
  if (bytes <= 0 || !is_known.load(std::memory_order_relaxed)) return;
  const uintptr_t first = page_of(data), end = reinterpret_cast<uintptr_t>(data + bytes);
  if (madvise(reinterpret_cast<void*>(first), end - first, kPopulateRead) != 0 && errno == EINVAL) is_known = false;
}

void read_ahead(const uint8_t* data, int64_t bytes) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(data + bytes);
  for (uintptr_t at = page_of(data); at < end; at += kReadAhead)
    madvise(reinterpret_cast<void*>(at), std::min(kReadAhead, end - at), MADV_WILLNEED);
}
#else
void map_pages(const uint8_t*, int64_t) {}
void read_ahead(const uint8_t*, int64_t) {}
#endif

void trim_heap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace kt
