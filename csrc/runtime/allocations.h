// How often the extension's own code took memory from the heap, so that a test can see that a decode step does not.
#pragma once
#include <cstdint>

namespace kt {

// Calls of operator new and of the pool's allocator so far, by all threads; -1 where the linker cannot redirect them.
int64_t num_allocations();
void note_allocation();

}  // namespace kt
