// Rows of keys or values into a cache.
#pragma once
#include "runtime/pool.h"

namespace kt {

// One tensor of a cache, strides in elements. Scales are of codes only. split: dimensions with the first scale, the
// others have the second; 0: there is one.
struct KvTarget {
  KvType type;
  uint8_t* data;  // [slots, heads, dim]
  int64_t slot, head;
  float* scales;  // [slots, heads, parts]
  int64_t scale_slot, scale_head;
  int64_t num_slots, dim, split;
};

// Row x [heads, dim], heads `x_head` apart, to a slot. Throws std::out_of_range for a slot outside of the cache.
void write_kv_row(const KernelTable& kernels, const KvTarget& to, const float* x, int64_t x_head, int64_t heads,
                  int64_t row, int64_t slot);

// x: [rows, heads, dim], strides in elements.
void write_kv(WorkerPool& pool, const KvTarget& to, const float* x, int64_t x_row, int64_t x_head, int64_t rows,
              int64_t heads, const int64_t* slots);

}  // namespace kt
