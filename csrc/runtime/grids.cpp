// See grids.h.
#include "runtime/grids.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/types.h"

namespace kt {

GridTables grid_tables = {};

namespace {

template <class Table> void fill(Table& table, const uint8_t* values, size_t bytes) {
  if (bytes != sizeof table) throw std::invalid_argument("a grid of " + std::to_string(bytes) + " bytes");
  std::memcpy(&table, values, bytes);
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
