// See index.h. Scores are computed for some rows at a time, spans of positions side by side; then each choice is made.
#include "ops/attention/index.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/attention/attention.h"

namespace kt {
namespace {

constexpr int64_t kMaxScores = int64_t{8} << 20;  // floats that are kept at a time, but for one row's at least

// Greater scores first, then lower blocks: as one number, of which smaller ones are better.
uint64_t rank_of(float score, int64_t block) {
  uint32_t bits;
  score += 0.0f;  // -0 is 0
  std::memcpy(&bits, &score, sizeof bits);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(block);
}

int64_t blocks_of(int64_t len, int64_t block) { return (len + block - 1) / block; }

// The slots of a choice among the first `len` positions of a row.
class Choosing {
 public:
  Choosing(const IndexArgs& args, const IndexChoice& choice) : args_(args), choice_(choice) {}

  // Whether all positions are chosen, whatever their scores.
  bool takes_all(int64_t len) const { return blocks_of(len, choice_.block) <= choice_.num_blocks; }

  // scores: of the positions, unused where all are taken. ranks: room for one of each block.
  void run(int64_t row, int64_t number, int64_t len, const float* scores, uint64_t* ranks) const {
    int32_t* out = choice_.slots + number * choice_.num_blocks * choice_.block;
    const int64_t all = blocks_of(len, choice_.block), count = std::min(all, choice_.num_blocks);
    for (int64_t b = 0; b < all; ++b) ranks[b] = takes_all(len) ? static_cast<uint64_t>(b) : rank(scores, len, b);
    if (count < all) std::nth_element(ranks, ranks + count, ranks + all);
    for (int64_t i = 0; i < count; ++i) ranks[i] &= 0xffffffffu;
    std::sort(ranks, ranks + count);
    const int32_t* table = args_.block_table + args_.seq_ids[row] * args_.table_stride;
    int32_t filled = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = static_cast<int64_t>(ranks[i]) * choice_.block;
      for (int64_t p = first; p < std::min(first + choice_.block, len); ++p)
        out[filled++] = static_cast<int32_t>(table[p / args_.page_size] * args_.page_size + p % args_.page_size);
    }
    std::fill(out + filled, out + choice_.num_blocks * choice_.block, 0);
    choice_.counts[number] = filled;
  }

 private:
  uint64_t rank(const float* scores, int64_t len, int64_t b) const {
    const int64_t first = b * choice_.block, last = std::min(first + choice_.block, len);
    if (b > (len - 1) / choice_.block - choice_.local) return rank_of(std::numeric_limits<float>::infinity(), b);
    return rank_of(*std::max_element(scores + first, scores + last), b);
  }

  const IndexArgs& args_;
  const IndexChoice& choice_;
};

void check(const IndexArgs& a) {
  if (a.num_heads < 1 || a.num_heads > kMaxIndexHeads)
    throw std::invalid_argument(std::to_string(a.num_heads) + " index heads; up to " + std::to_string(kMaxIndexHeads) +
                                " are supported");
  AttentionArgs pages{};
  pages.num_rows = a.num_rows;
  pages.seq_ids = a.seq_ids;
  pages.kv_lens = a.kv_lens;
  pages.block_table = a.block_table;
  pages.table_stride = a.table_stride;
  pages.num_seqs = a.num_seqs;
  pages.max_pages = a.max_pages;
  pages.page_size = a.page_size;
  pages.num_slots = a.num_slots;
  check_pages(pages);
}

// Scores of rows first .. first + count - 1: [row][heads apart][stride].
void score_rows(WorkerPool::Session& session, const IndexArgs& a, int64_t first, int64_t count, int64_t stride,
                int64_t apart, const Choosing& choosing, float* scores) {
  const int64_t spans = (stride + kPositionSplit - 1) / kPositionSplit;
  session.run(count * spans, [&](int64_t i) {
    const int64_t row = i / spans, begin = i % spans * kPositionSplit, len = a.kv_lens[first + row];
    if (begin >= len || choosing.takes_all(len)) return;
    session.kernels().index_scores(a, first + row, begin, std::min<int64_t>(begin + kPositionSplit, len),
                                   scores + row * apart * stride + begin, stride);
  });
}

}  // namespace

void choose_positions(WorkerPool& pool, const IndexArgs& args, const IndexChoice& choice) {
  check(args);
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Attention, args.num_rows, true);
  const Choosing choosing(args, choice);
  int64_t longest = 1;
  for (int64_t row = 0; row < args.num_rows; ++row) longest = std::max<int64_t>(longest, args.kv_lens[row]);
  const int64_t stride = (longest + 15) / 16 * 16, apart = args.weights == nullptr ? args.num_heads : 1;
  const int64_t batch = std::max<int64_t>(1, std::min(args.num_rows, kMaxScores / (stride * apart)));
  float* scores = session.scratch<float>(batch * apart * stride);
  const int64_t num_ranks = blocks_of(longest, choice.block);
  uint64_t* ranks = session.scratch<uint64_t>(session.num_threads() * num_ranks);
  for (int64_t first = 0; first < args.num_rows; first += batch) {
    const int64_t count = std::min(batch, args.num_rows - first);
    score_rows(session, args, first, count, stride, apart, choosing, scores);
    session.run(count * apart, [&](int64_t i, int thread) {
      const int64_t row = first + i / apart;
      choosing.run(row, first * apart + i, args.kv_lens[row], scores + i * stride, ranks + thread * num_ranks);
    });
  }
}

}  // namespace kt
