// See pages.h.
#include "runtime/pages.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace kt {

#if defined(__linux__)
namespace {

// However much is asked for, the system reads what its device takes at once (max_sectors_kb, or read_ahead_kb if that
// is more); and a request that is split into many costs more of its time.
constexpr uintptr_t kReadAhead = 512 << 10;

uintptr_t page_of(const uint8_t* data) {
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));  // on aarch64 also 16 or 64 KiB
  return reinterpret_cast<uintptr_t>(data) / page * page;
}

}  // namespace

void read_ahead(const uint8_t* data, int64_t bytes) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(data + bytes);
  for (uintptr_t at = page_of(data); at < end; at += kReadAhead)
    madvise(reinterpret_cast<void*>(at), std::min(kReadAhead, end - at), MADV_WILLNEED);
}
#else
void read_ahead(const uint8_t*, int64_t) {}
#endif

void trim_heap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace kt
