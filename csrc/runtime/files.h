// Files that are mapped, by the addresses of their maps. What is needed once is read from the file instead: into memory
// that a processor's cache holds, with nothing to enter into page tables and to take out of them again.
#pragma once
#include <cstdint>

namespace kt {

// Says that the `bytes` at `data` are those at the beginning of the open file `fd`, of which it keeps a descriptor of
// its own. Throws std::runtime_error where the system has none left.
void note_file(const uint8_t* data, int64_t bytes, int fd);
// Closes it again. Nothing for addresses that were not noted.
void forget_file(const uint8_t* data);

// The `bytes` at `data`: read into `room`, where they are of a file, or else where they are. Waits for the disk. Throws
// std::runtime_error for a file that cannot be read, or that has become shorter.
const uint8_t* read_once(const uint8_t* data, int64_t bytes, uint8_t* room);

// Takes the `bytes` from `data` on out of the system's cache, if they are of a file: a hint. Pages that are mapped
// stay.
void drop_cached(const uint8_t* data, int64_t bytes);

}  // namespace kt
