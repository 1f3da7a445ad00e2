// What the system is told of pages that are about to be read. Hints: where it does not know them, nothing happens.
#pragma once
#include <cstdint>

namespace kt {

// Has the file's pages under `data` read by and by, without waiting for them.
void read_ahead(const uint8_t* data, int64_t bytes);

// Gives free memory of the heap back to the system (glibc keeps it).
void trim_heap();

}  // namespace kt
