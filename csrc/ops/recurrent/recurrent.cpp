// See recurrent.h.
#include "ops/recurrent/recurrent.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/linear/rows.h"

namespace kt {
namespace {

constexpr int64_t kConvChannels = 1024;  // of a task, at most: a row of them is a stream
constexpr int64_t kConvRows = 64;
constexpr int64_t kSelectiveTask = 64;           // channels of a task, as kernels/common/recurrent.inl keeps them
constexpr int64_t kReadyFloats = 4 * kScanRows;  // times the padded K: keys and queries that delta_scan makes ready

[[noreturn]] void refuse(const std::string& what, int64_t index, const std::string& why) {
  throw std::invalid_argument(what + "[" + std::to_string(index) + "] " + why);
}

int64_t rows_of(const RecurrentStep& step, int64_t s) { return step.first_rows[s + 1] - step.first_rows[s]; }

void check_ranges(const RecurrentStep& step) {
  if (step.num_seqs > 0 && step.first_rows[0] != 0) refuse("first_rows", 0, "must be 0");
  for (int64_t s = 0; s < step.num_seqs; ++s) {
    if (rows_of(step, s) < 0 || step.first_rows[s + 1] > step.num_rows)
      refuse("first_rows", s + 1,
             "is " + std::to_string(step.first_rows[s + 1]) + ": they must not descend, nor pass the step's " +
                 std::to_string(step.num_rows) + " rows");
    for (const int32_t* slots : {step.read_slots, step.write_slots})
      if (slots[s] < -1 || slots[s] >= step.num_slots)
        refuse(slots == step.read_slots ? "read_slots" : "write_slots", s,
               "is " + std::to_string(slots[s]) + ", but there are " + std::to_string(step.num_slots) + " slots");
  }
}

// The sequences that have rows. A slot belongs to the sequence that writes it.
Span<int64_t> check_step(WorkerPool::Session& session, const RecurrentStep& step) {
  check_ranges(step);
  const Span<int64_t> owners = session.span<int64_t>(step.num_slots);
  Span<int64_t> seqs = {session.scratch<int64_t>(step.num_seqs), 0};
  std::fill(owners.begin(), owners.end(), int64_t{-1});
  const auto own = [&](int32_t slot, int64_t s, const char* name, int64_t index) {
    if (slot < 0) return;
    if (owners[slot] >= 0 && owners[slot] != s)
      refuse(name, index,
             "is slot " + std::to_string(slot) + ", which sequence " + std::to_string(owners[slot]) +
                 " of the same step writes too");
    owners[slot] = s;
  };
  for (int64_t s = 0; s < step.num_seqs; ++s) {
    if (rows_of(step, s) == 0) continue;
    seqs[seqs.count++] = s;
    own(step.write_slots[s], s, "write_slots", s);
    for (int64_t t = step.first_rows[s]; t < step.first_rows[s + 1]; ++t) {
      if (step.save_slots[t] < -1 || step.save_slots[t] >= step.num_slots)
        refuse("save_slots", t,
               "is " + std::to_string(step.save_slots[t]) + ", but there are " + std::to_string(step.num_slots) +
                   " slots");
      own(step.save_slots[t], s, "save_slots", t);
    }
  }
  for (const int64_t s : seqs)
    if (step.read_slots[s] >= 0 && owners[step.read_slots[s]] >= 0 && owners[step.read_slots[s]] != s)
      refuse("read_slots", s,
             "is slot " + std::to_string(step.read_slots[s]) + ", which sequence " +
                 std::to_string(owners[step.read_slots[s]]) + " of the same step writes");
  return seqs;
}

void clear_rest(const RecurrentStep& step, float* out, int64_t cols) {
  const int64_t first = step.num_seqs > 0 ? step.first_rows[step.num_seqs] : 0;
  std::fill(out + first * cols, out + step.num_rows * cols, 0.0f);
}

RecurrentTask task_of(const RecurrentStep& step, int64_t s) {
  RecurrentTask task{};
  task.first_row = task.seq_row = step.first_rows[s];
  task.num_rows = rows_of(step, s);
  task.read_slot = step.read_slots[s];
  task.write_slot = step.write_slots[s];
  return task;
}

int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

using ScanKernel = void (*)(const ScanArgs&, const RecurrentTask&, float*);

void scan(WorkerPool& pool, const RecurrentStep& step, ScanArgs args, ScanKernel KernelTable::* kernel) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Recurrent, step.num_rows, true);
  const Span<int64_t> seqs = check_step(session, step);
  op.add_bytes(seqs.count * args.heads * args.dim_k * args.dim_v * static_cast<int64_t>(sizeof(float)));
  args.save_slots = step.save_slots;
  clear_rest(step, args.out, args.heads * args.dim_v);
  // A head is one task, or several where there are few: keys are made ready once for all columns of a task.
  const int64_t cols = session.kernels().scan_cols, blocks = divided(args.dim_v, cols);
  const int64_t units = std::max<int64_t>(seqs.count * args.heads, 1);
  const int64_t wanted = session.num_threads() > 1 ? divided(2 * session.num_threads(), units) : 1;
  const int64_t parts = std::max<int64_t>(1, std::min(blocks, wanted)), width = divided(blocks, parts) * cols;
  const int64_t memory = kReadyFloats * ((args.dim_k + 15) / 16 * 16) + args.dim_k * width;
  float* of_threads = session.scratch<float>(session.num_threads() * memory);
  session.run(seqs.count * args.heads * parts, [&](int64_t i, int thread) {
    RecurrentTask task = task_of(step, seqs[i / parts / args.heads]);
    task.head = static_cast<int32_t>(i / parts % args.heads);
    task.first = i % parts * width;
    task.count = std::min(width, args.dim_v - task.first);
    if (task.count > 0) (session.kernels().*kernel)(args, task, of_threads + thread * memory);
  });
}

}  // namespace

void causal_conv(WorkerPool& pool, const RecurrentStep& step, ConvArgs args) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Recurrent, step.num_rows, true);
  const Span<int64_t> seqs = check_step(session, step);
  const int64_t slot_size = (args.width - 1) * args.channels;
  op.add_bytes((seqs.count * slot_size + args.width * args.channels) * static_cast<int64_t>(sizeof(float)));
  args.save_slots = step.save_slots;
  clear_rest(step, args.out, args.channels);
  int64_t blocks = 0;
  for (const int64_t s : seqs) blocks += divided(rows_of(step, s), kConvRows);
  Span<RecurrentTask> pieces = {session.scratch<RecurrentTask>(blocks), 0};
  for (const int64_t s : seqs) {
    const RecurrentTask whole = task_of(step, s);
    const float* before = whole.read_slot < 0 ? nullptr : args.states + whole.read_slot * slot_size;
    if (before != nullptr && whole.num_rows > kConvRows) {  // the last piece may write what the first one reads
      float* copy = session.scratch<float>(slot_size);
      before = std::copy_n(before, slot_size, copy) - slot_size;
    }
    for (int64_t row = 0; row < whole.num_rows; row += kConvRows) {
      RecurrentTask& piece = pieces[pieces.count++] = whole;
      piece.before = before;
      piece.first_row += row;
      piece.num_rows = std::min(kConvRows, whole.num_rows - row);
      if (row + piece.num_rows < whole.num_rows) piece.write_slot = -1;
    }
  }
  const int64_t per_thread = std::max<int64_t>(divided(blocks * args.channels, session.num_threads()), 1);
  const int64_t width = std::min(kConvChannels, divided(per_thread, 16) * 16);
  const int64_t parts = divided(args.channels, width), memory = 2 * args.width * width;
  float* of_threads = session.scratch<float>(session.num_threads() * memory);
  session.run(blocks * parts, [&](int64_t i, int thread) {
    RecurrentTask task = pieces[i / parts];
    task.first = i % parts * width;
    task.count = std::min(width, args.channels - task.first);
    session.kernels().causal_conv(args, task, of_threads + thread * memory);
  });
}

void delta_scan(WorkerPool& pool, const RecurrentStep& step, ScanArgs args) {
  scan(pool, step, args, &KernelTable::delta_scan);
}

void linear_scan(WorkerPool& pool, const RecurrentStep& step, ScanArgs args) {
  scan(pool, step, args, &KernelTable::linear_scan);
}

void selective_scan(WorkerPool& pool, const RecurrentStep& step, SelectiveArgs args) {
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Recurrent, step.num_rows, true);
  const Span<int64_t> seqs = check_step(session, step);
  op.add_bytes((seqs.count + 1) * args.channels * args.size * static_cast<int64_t>(sizeof(float)));
  args.save_slots = step.save_slots;
  clear_rest(step, args.out, args.channels);
  const int64_t parts = divided(args.channels, kSelectiveTask), memory = 2 * kSelectiveTask * args.size;
  float* of_threads = session.scratch<float>(session.num_threads() * memory);
  session.run(seqs.count * parts, [&](int64_t i, int thread) {
    RecurrentTask task = task_of(step, seqs[i / parts]);
    task.first = i % parts * kSelectiveTask;
    task.count = std::min(kSelectiveTask, args.channels - task.first);
    session.kernels().selective_scan(args, task, of_threads + thread * memory);
  });
}

void gated_norm(WorkerPool& pool, const GatedNorm& norm) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Recurrent, norm.rows, true);
  for_rows(session, norm.rows * norm.groups, rows_per_task(norm.group), [&](int64_t i) {
    const int64_t row = i / norm.groups, group = i % norm.groups;
    session.kernels().gated_norm_row(norm.spec, norm.x + i * norm.group,
                                     norm.gate + row * norm.gate_row + group * norm.gate_group,
                                     norm.weight + group * norm.weight_group, norm.group, norm.out + i * norm.group);
  });
}

void delta_gates(WorkerPool& pool, const float* a, const float* b, const float* rate, const float* bias, int64_t rows,
                 int64_t heads, float* decay, float* beta) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Recurrent, rows, true);
  for_rows(session, rows, rows_per_task(heads), [&](int64_t r) {
    session.kernels().delta_gates_row(a + r * heads, b + r * heads, rate, bias, heads, decay + r * heads,
                                      beta + r * heads);
  });
}

}  // namespace kt
