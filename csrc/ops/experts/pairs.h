// Pairs (token, k) of a call of experts, sorted by expert, in chunks that a task computes at once.
#pragma once
#include "ops/linear/activations.h"
#include "runtime/pool.h"

namespace kt {

constexpr int64_t kPairChunk = 128;  // rows that a task's accumulators have room for

// Pairs of one chunk of tokens, sorted by expert, in token order within an expert.
struct SortedPairs {
  Span<int32_t> token;    // [pairs] row of the input
  Span<int64_t> pair_of;  // [tokens * top_k] position in `token`, or -1
  struct Group {
    int64_t expert, first, count;  // pairs first .. first + count - 1
    int64_t tasks_before;          // chunks of all groups before this one
  };
  Span<Group> groups;
  int64_t chunks = 0, chunk_size = kPairChunk;
  Span<int32_t> plane;  // [pairs * planes] rows of the quantized input, where these are several for each token
};

// ids [tokens, top_k], of which `num_experts` is skipped.
SortedPairs sort_pairs(WorkerPool::Session& session, const int64_t* ids, int64_t tokens, int64_t top_k,
                       int64_t num_experts);

// Chunk number `i` of all groups: its expert, its first pair and how many there are.
struct PairChunk {
  int64_t expert, first;
  int count;
};

PairChunk chunk_at(const SortedPairs& r, int64_t i);

// The rows of the input, or with several planes of the quantized input, that belong to pair `first` and those after it.
const int32_t* input_rows(const SortedPairs& r, int64_t first, int planes);

// The tokens of every chunk, `planes` rows each: of the input, or of the pairs.
Span<TokenGroup> token_groups(WorkerPool::Session& session, const SortedPairs& r, bool is_input, int planes);

}  // namespace kt
