// See grids.h.
#include "runtime/grids.h"

#include <cstring>
#include <set>
#include <stdexcept>
#include <string>

#include "runtime/types.h"

namespace kt {

GridTables grid_tables = {};

namespace {

template <class Entry, int SIZE> void fill(Grid<Entry, SIZE>& grid, const uint8_t* values, size_t bytes) {
  constexpr int cols = sizeof(Entry), half = cols / 2, bits = 8 / half;
  if (bytes != sizeof grid.entries) throw std::invalid_argument("a grid of " + std::to_string(bytes) + " bytes");
  const std::set<uint8_t> known(values, values + bytes);
  if (known.size() > 1u << bits)
    throw std::invalid_argument("a grid of " + std::to_string(known.size()) + " different values");
  uint8_t number_of[256] = {}, count = 0;
  std::memset(grid.values, 0, sizeof grid.values);
  for (const uint8_t value : known) {
    for (int i = count; i < 64; i += 1 << bits) grid.values[i] = value;
    number_of[value] = count++;
  }
  for (int n = 0; n < SIZE; ++n) {
    grid.low[n] = grid.high[n] = 0;
    for (int c = 0; c < cols; ++c) {
      uint8_t& byte = c < half ? grid.low[n] : grid.high[n];
      byte = static_cast<uint8_t>(byte | number_of[values[n * cols + c]] << (c % half * bits));
    }
  }
  std::memcpy(grid.entries, values, bytes);
}

}  // namespace

void set_grid(int type, const uint8_t* values, size_t bytes) {
  switch (static_cast<QType>(type)) {
    case QType::IQ2_XXS: return fill(grid_tables.iq2_xxs, values, bytes);
    case QType::IQ2_XS: return fill(grid_tables.iq2_xs, values, bytes);
    case QType::IQ2_S: return fill(grid_tables.iq2_s, values, bytes);
    case QType::IQ3_XXS: return fill(grid_tables.iq3_xxs, values, bytes);
    case QType::IQ3_S: return fill(grid_tables.iq3_s, values, bytes);
    case QType::IQ1_S: return fill(grid_tables.iq1, values, bytes);
    default: throw std::invalid_argument("type " + std::to_string(type) + " has no grid");
  }
}

}  // namespace kt
