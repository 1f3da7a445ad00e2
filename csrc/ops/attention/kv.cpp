// See kv.h.
#include "ops/attention/kv.h"

#include <stdexcept>
#include <string>

#include "ops/linear/rows.h"

namespace kt {

void write_kv_row(const KernelTable& kernels, const KvTarget& to, const float* x, int64_t x_head, int64_t heads,
                  int64_t row, int64_t slot) {
  if (slot < 0 || slot >= to.num_slots)
    throw std::out_of_range("row " + std::to_string(row) + " goes to slot " + std::to_string(slot) + " of a cache of " +
                            std::to_string(to.num_slots));
  const int64_t bytes = kv_bytes(to.type), first = to.split > 0 ? to.split : to.dim;
  for (int64_t head = 0; head < heads; ++head, x += x_head) {
    uint8_t* out = to.data + (slot * to.slot + head * to.head) * bytes;
    float* scale = to.scales == nullptr ? nullptr : to.scales + slot * to.scale_slot + head * to.scale_head;
    kernels.store_kv(to.type, x, first, out, scale);
    if (first < to.dim) kernels.store_kv(to.type, x + first, to.dim - first, out + first * bytes, scale + 1);
  }
}

void write_kv(WorkerPool& pool, const KvTarget& to, const float* x, int64_t x_row, int64_t x_head, int64_t rows,
              int64_t heads, const int64_t* slots) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Attention, rows, true);
  for_rows(session, rows, rows_per_task(heads * to.dim),
           [&](int64_t row) { write_kv_row(session.kernels(), to, x + row * x_row, x_head, heads, row, slots[row]); });
}

}  // namespace kt
