// What kernels did and when: records in a ring that any thread writes without waiting and one reader takes. All are
// little endian and a multiple of 8 bytes, behind a header (u32 bytes of the record, u16 kind, i16 layer or -1):
//
//   1 step begins  u64 time_ns, i64 step, i32 rows, i32 rows to keep
//   2 step ends    u64 time_ns, i64 step
//   3 operation    OpRecord, below. Those of a device do not overlap
//   4 experts      i32 rows, i32 top_k, i32 experts, i32 num_ids; then u32 rows of each expert [experts],
//                  i32 row [num_ids] and i16 ids [num_ids, top_k] (-1: skipped) of the rows that are told, up to 8
//                  bytes
//
// Times are of the steady clock. Records of other threads may lie outside of their step: they are joined by time.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kt {

// What a moment of a step is spent on, by the numbers that records have.
enum class Part : uint8_t {
  Other,
  Norm,
  Linear,
  Attention,
  Recurrent,  // convolutions, scans and gated norms of recurrent layers
  Router,
  Experts,
  SharedExperts,
  Mlp,
  Embedding,
  LmHead,
  Sampling,
  WaitCpu,   // of a GPU, for the experts of the CPU
  Copy,      // of weights, to a GPU
  WaitDisk,  // experts of the CPU wait for their weights
  Gpu,       // all of a GPU's work in a step whose parts were not timed
  Host       // Python and torch between all of these; whoever reads the records computes it
};
// Their names, in the order of their numbers.
const std::vector<const char*>& part_names();

// Phases within a part.
constexpr uint8_t kQkv = 1, kOutput = 2;                                // of Linear
constexpr uint8_t kSort = 1, kGateUp = 2, kDown = 3, kCombine = 4;      // of Experts; 0: conversions beside a GPU
constexpr int64_t kAllRows = 256;                                       // calls of up to so many rows tell all choices
constexpr int64_t kRingBytes = int64_t{8} << 20, kMinRingBytes = 4096;  // of a ring: as a rule, and at least

struct RecordHeader {
  uint32_t nbytes;  // of the whole record; written last
  uint16_t kind;
  int16_t layer;  // -1: none
};

// bytes: read, of weights, keys and values. busy_ns: within tasks, all threads together. wait_ns: from handing jobs
// over until other threads began, in the mean; and from being due to beginning.
struct OpRecord {
  RecordHeader header;
  uint8_t part, op;
  uint16_t device;  // 0: the CPU
  int32_t rows;
  uint64_t begin_ns, duration_ns, bytes, busy_ns, wait_ns;
  uint32_t num_jobs, num_threads;
};
static_assert(sizeof(OpRecord) == 64, "readers count on it");

int64_t steady_ns();  // of the steady clock, CLOCK_MONOTONIC

// Bytes [tail, head) of the ring, which only ever grow, belong to records. A writer moves the head by what it needs,
// fills that in and then writes the record's length; the reader takes records in order up to the first without a
// length, clears them and moves the tail. A record that would cross the end of the memory begins at its start instead,
// and a record of kind 0 fills what is left. A record for which there is no room is counted and forgotten.
class Profile {
 public:
  // bytes: a power of two, at least kMinRingBytes. Throws std::invalid_argument.
  explicit Profile(int64_t bytes);
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  int64_t capacity() const { return static_cast<int64_t>(capacity_); }
  uint64_t num_dropped() const { return num_dropped_.load(); }

  // keep: rows of the step whose experts are told where there are more than kAllRows.
  void begin_step(int64_t step, int32_t rows, const std::vector<int32_t>& keep);
  void end_step(int64_t step);

  void write(OpRecord& record, int layer);
  // One call of a layer's experts: ids [rows, top_k]; one of `experts` is skipped.
  void write_experts(int layer, const int64_t* ids, int64_t rows, int64_t top_k, int64_t experts);

  // Bytes of the records that are complete. Then up to `limit` bytes of whole ones, which leave the ring; returns how
  // many bytes.
  int64_t num_ready();
  int64_t take(char* out, int64_t limit);

 private:
  char* reserve(uint64_t nbytes);
  static void commit(char* record, uint64_t nbytes, uint16_t kind, int layer);
  uint32_t length_at(uint64_t position) const;

  const uint64_t capacity_;
  const std::unique_ptr<uint64_t[]> memory_;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic<uint64_t> num_dropped_{0};
  std::mutex reader_;
  std::mutex keep_mutex_;
  std::vector<int32_t> keep_;  // guarded by keep_mutex_
};

// What the operations of this thread belong to. part: that of linear layers, norms and activations, which serve many;
// Other: each has its own.
struct ProfileScope {
  int16_t layer = -1;
  Part part = Part::Other;
  uint8_t op = 0;
};
ProfileScope& profile_scope();
// When this thread was asked for the operation that it begins next, whose wait_ns it then adds to; 0: does not matter.
int64_t& profile_due_ns();

}  // namespace kt
