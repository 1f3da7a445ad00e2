// Which token follows: one row of logits after the other, rows side by side on a worker pool.
#pragma once
#include <cstdint>
#include <vector>

#include "runtime/pool.h"

namespace kt {

struct SampleRow {
  const float* raw;       // [V], as the model computed them: must be finite
  const float* adjusted;  // [V], raw itself where nothing was changed, and otherwise possibly -infinity
  double temperature;     // 0: the best
  double top_p, min_p, uniform;
  int64_t top_k;            // 0 or less: all
  const uint32_t* allowed;  // [ceil(V / 32)] bits of the tokens that may be chosen, token 0 the lowest; null: all
};

// token: the choice, or -1 where logit `bad` of raw is not finite, or of adjusted is NaN or +infinity (or all are
// -infinity).
struct SamplePick { int64_t token, bad; };

// One pick per row. vocab >= 1; its ids fit int32.
std::vector<SamplePick> sample_rows(WorkerPool& pool, const std::vector<SampleRow>& rows, int64_t vocab);

// Tokens of a row of logits: all that are as good as its top_k-th, and maybe more of the best ones. wanted.raw:
// [count], theirs, finite; the other pointers mean nothing.
struct CandidateRow {
  SampleRow wanted;    // 1 <= top_k <= count, or count = vocab
  const int32_t* ids;  // [count], ascending
  int64_t count;
};

// Of each row the token that sample_rows would choose in the whole row, of `vocab` tokens.
std::vector<int64_t> sample_candidates(WorkerPool& pool, const std::vector<CandidateRow>& rows, int64_t vocab);

// log softmax in fp64, rounded to fp32, of logits [rows, vocab]: of token ids[r], and of the `count` most likely ones,
// the lowest id first among equal logits: top_ids, top [rows, count]. Everything is NaN where a logit is NaN or
// +infinity, or all are -infinity.
void token_logprobs(WorkerPool& pool, const float* logits, int64_t rows, int64_t vocab, const int64_t* ids,
                    int64_t count, float* out, int64_t* top_ids, float* top);

// The weights themselves, for tests: 2^((logit - top) log2(e) / temperature), 0 below 2^-64.
void row_weights(WorkerPool& pool, const float* logits, int64_t vocab, double temperature, double* out);

}  // namespace kt
