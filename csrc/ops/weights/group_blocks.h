// Rows of codes, scales and zero points, as safetensors hold them apart, to blocks of columns that have all three.
#pragma once
#include <cstdint>

namespace kt {

// Of `rows` rows. A block of `size` columns gets, one behind the other: 4 bytes of `numbers` (of the row), piece_bytes
// of `scales` and a byte of `zeros`, those of group b * size / group, and its codes. numbers, zeros: may be nullptr.
struct GroupRows {
  const uint8_t* codes;    // [rows, cols], or [rows, cols / 2] if is_paired: the first of two columns in the low nibble
  const uint8_t* scales;   // [rows, groups] pieces
  const uint8_t* zeros;    // [rows, groups]
  const uint8_t* numbers;  // [rows] of 4 bytes
  int64_t rows, cols, groups;
  int64_t size, group, piece_bytes;
  bool is_paired;
};

// Nibbles of every 32 columns become those of ggml's blocks: columns i and 16 + i in byte i. One thread. Throws
// std::invalid_argument for sizes that do not fit.
void write_group_blocks(const GroupRows& in, uint8_t* out);

}  // namespace kt
