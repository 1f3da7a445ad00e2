// See allocations.h. The linker redirects the extension's calls of operator new to here (--wrap in CMakeLists.txt),
// those of the extension only: no other library of the process is touched.
#include "runtime/allocations.h"

#include <atomic>
#include <cstddef>
#include <new>

namespace kt {
namespace {

std::atomic<int64_t> count{0};

}  // namespace

int64_t num_allocations() {
#if defined(KT_WRAP_NEW)
  return count.load(std::memory_order_relaxed);
#else
  return -1;
#endif
}

void note_allocation() { count.fetch_add(1, std::memory_order_relaxed); }

}  // namespace kt

#if defined(KT_WRAP_NEW)
extern "C" {
void* __real__Znwm(size_t size);
void* __real__Znam(size_t size);
void* __real__ZnwmSt11align_val_t(size_t size, std::align_val_t align);

void* __wrap__Znwm(size_t size) {
  kt::note_allocation();
  return __real__Znwm(size);
}
void* __wrap__Znam(size_t size) {
  kt::note_allocation();
  return __real__Znam(size);
}
void* __wrap__ZnwmSt11align_val_t(size_t size, std::align_val_t align) {
  kt::note_allocation();
  return __real__ZnwmSt11align_val_t(size, align);
}
}
#endif
