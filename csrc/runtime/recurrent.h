// Arguments of the kernels of recurrent layers (kernels/common/recurrent.inl): plain types only, see types.h.
//
// A layer keeps its states in slots, each contiguous. The rows of a step stand side by side, those of a sequence in
// ascending position; rows behind those of the last sequence carry no token.
#pragma once
#include <cstdint>

namespace kt {

// num_seqs sequences of a step; -1 is no slot. A sequence without rows is left as it is.
struct RecurrentStep {
  int64_t num_rows, num_seqs, num_slots;
  const int32_t* first_rows;   // [num_seqs + 1]: rows first_rows[s] .. first_rows[s + 1] - 1 are those of sequence s
  const int32_t* read_slots;   // [num_seqs]: the state before the first of them; -1: zeros
  const int32_t* write_slots;  // [num_seqs]: gets the state behind the last of them
  const int32_t* save_slots;   // [num_rows]: gets the state behind this row too
};

// What one task computes: some rows of one sequence, and of each some channels or columns.
struct RecurrentTask {
  int64_t first_row, num_rows;
  int32_t head;  // of scans over heads
  int64_t first, count;
  int64_t read_slot, write_slot;
  int64_t seq_row = 0;            // causal_conv: the first row of the sequence,
  const float* before = nullptr;  // and the state before it, nullptr: zeros; read_slot does not count
};

constexpr int kMaxConvWidth = 8;
constexpr int kScanRows = 8;  // whose keys and queries delta_scan makes ready at a time

struct ConvArgs {
  const float* x;  // [T, channels], rows `ldx` apart
  int64_t ldx;
  const float* weight;                 // [channels, width]; fastest where channels lie side by side
  int64_t weight_channel, weight_tap;  // strides
  const float* bias;                   // [channels] or nullptr
  float* out;                          // [T, channels]
  float* states;                       // [slots, width - 1, channels]
  int64_t channels;
  int width;
  bool is_silu;
  const int32_t* save_slots;
};

struct ScanArgs {
  const float *q, *k, *v;       // [T, key heads, K] twice, [T, heads, V]; heads contiguous
  int64_t q_row, k_row, v_row;  // strides in elements
  const float *decay, *beta;    // logarithm [T, heads], or [T, heads, K] if is_per_key; beta [T, heads], delta_scan
  int64_t decay_row, beta_row;
  float* out;     // [T, heads, V]
  float* states;  // [slots, heads, K, V]
  int64_t key_heads, heads, dim_k, dim_v;
  bool is_per_key;
  bool has_norm;  // of queries and keys, delta_scan
  float norm_eps, scale;
  const int32_t* save_slots;
};

struct SelectiveArgs {
  const float *x, *dt;  // [T, channels]
  const float* a;       // [channels, N]
  const float *b, *c;   // [T, N]
  const float* d;       // [channels] or nullptr
  int64_t x_row, dt_row, b_row, c_row;
  float* out;     // [T, channels]
  float* states;  // [slots, channels, N]
  int64_t channels, size;
  const int32_t* save_slots;
};

}  // namespace kt
