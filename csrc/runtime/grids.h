// The tables that codes of ggml's IQ1, IQ2 and IQ3 types stand for: 8 or 4 values each, first column in the lowest
// byte. They are numbers of the format, handed over once by ktransformers/kernels/cpu/grids.py before a pool is made.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kt {

// SIZE entries. `low` and `high` are the first and the second half of their columns once more, as numbers of the few
// values there are, 2 bits each (of entries of 4 columns: 4 bits); values[i] is what such a number stands for, whatever
// stands above its bits.
template <class Entry, int SIZE> struct Grid {
  static constexpr int size = SIZE;
  alignas(64) uint8_t low[SIZE], high[SIZE], values[64];
  Entry entries[SIZE];
  uint8_t room[64];  // what loads that are wider than an entry may read, as they may `values`
};

struct GridTables {
  Grid<uint64_t, 256> iq2_xxs;  // 8, 25 and 43, without signs
  Grid<uint64_t, 512> iq2_xs;
  Grid<uint64_t, 1024> iq2_s;
  Grid<uint64_t, 2048> iq1;     // 8 times -1, 0 and 1
  Grid<uint32_t, 256> iq3_xxs;  // 4 .. 62, without signs
  Grid<uint32_t, 512> iq3_s;    // 1 .. 15, without signs
};

extern GridTables grid_tables;  // zeros until set_grid

// Stores the values of ggml type `type`, one byte each. Throws std::invalid_argument for a type without such a table,
// another number of bytes than it has, or more different values than there are.
void set_grid(int type, const uint8_t* values, size_t bytes);

}  // namespace kt
