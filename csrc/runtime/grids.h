// The tables that codes of ggml's IQ1, IQ2 and IQ3 types stand for: 8 or 4 values each, first column in the lowest
// byte. They are numbers of the format, handed over once by ktransformers/kernels/cpu/grids.py when the extension is
// loaded.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kt {

struct GridTables {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];  // 8, 25 and 43, without signs
  uint64_t iq1[2048];                               // 8 times -1, 0 and 1
  uint32_t iq3_xxs[256], iq3_s[512];                // 4 .. 62 and 1 .. 15, without signs
};

extern GridTables grid_tables;  // zeros until set_grid

// Stores the values of ggml type `type`, one byte each. Throws std::invalid_argument for a type without such a table,
// or another number of bytes than it has.
void set_grid(int type, const uint8_t* values, size_t bytes);

}  // namespace kt
