// See sampling.h. The steps and their meaning are those of ktransformers/engine/sampling/sampler.py.
//
// Nothing is sorted. What orders tokens is turned into unsigned keys (of logits for top_k, of weights for top_p), and
// the key at which a given mass is reached is found by summing the mass of 1,024 ranges of keys, then of 1,024 ranges
// within the one in which it is reached, and so on (find_edge). Few tokens get that far:
//   top_k: the k-th greatest of the blocks' greatest logits is not above the k-th greatest logit, so that only tokens
//          from there on count. Where there are less than k blocks, a sample of the logits says from where on some more
//          than k tokens are likely; that there are is counted.
//   top_p: let w be the weight of the last token of the nucleus, p its share, Z the sum of all V weights. Those before
//          it have less than p Z, so it and those behind it, at most V tokens none of which has more than w, have more
//          than (1 - p) Z: w > (1 - p) Z / V. Tokens below that need no look. For the rounding of sums 1e-10 Z is
//          allowed, more than V 2^-53.
#include "ops/sampling/sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace kt {
namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr double kImpossible = 0x1p-64;  // of the best token's weight: less counts as 0
constexpr int kSampled = 8192;           // logits that tell about where a large top_k ends
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Memory for a row of V logits.
struct Room {
  float *maxima, *logits;  // of blocks; of some tokens
  float* masked;           // [V], of rows with tokens that may not be chosen
  double *sums, *weights;  // the same
  uint64_t* keys;          // [V]
  int32_t* ids;            // [V]
};

int64_t blocks_of(int64_t vocab) { return (vocab + kSampleBlock - 1) / kSampleBlock; }

// Rooms for every row, or for every thread where rows are more: of so many blocks, and of as many tokens in lists and
// masked rows, as far as they are needed.
class Rooms {
 public:
  Rooms(WorkerPool::Session& session, int64_t rows, int64_t blocks, int64_t listed, int64_t masked)
      : blocks_(blocks), listed_(listed), masked_(masked), of_rows_(rows <= session.num_threads()) {
    const int64_t count = of_rows_ ? rows : session.num_threads();
    doubles_ = session.scratch<double>(count * (blocks_ + 2 * listed_));
    floats_ = session.scratch<float>(count * (blocks_ + 2 * listed_ + masked_));
  }
  int64_t blocks() const { return blocks_; }
  Room of(int64_t row, int thread) const {
    const int64_t number = of_rows_ ? row : thread;
    double* d = doubles_ + number * (blocks_ + 2 * listed_);
    float* f = floats_ + number * (blocks_ + 2 * listed_ + masked_);
    Room room{};
    room.sums = d;
    room.weights = d + blocks_;
    room.keys = reinterpret_cast<uint64_t*>(d + blocks_ + listed_);
    room.maxima = f;
    room.logits = f + blocks_;
    room.ids = reinterpret_cast<int32_t*>(f + blocks_ + listed_);
    room.masked = f + blocks_ + 2 * listed_;
    return room;
  }

 private:
  int64_t blocks_, listed_, masked_;
  bool of_rows_;
  double* doubles_;
  float* floats_;
};

template <class To, class From> To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Ascending with the logit; both zeros have one key.
uint64_t key_of(float logit) {
  const uint32_t bits = bits_of<uint32_t>(logit + 0.0f);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
float logit_of(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key);
  return bits_of<float>(bits >> 31 != 0 ? bits & 0x7fffffffu : ~bits);
}

// The greatest key whose items, with those of greater keys, have at least the mass `goal`; the least key where all of
// them have less.
struct Edge {
  uint64_t key;
  double before;  // mass of greater keys
};
// Keys lie in least .. most, both included, and are overwritten; there must be some.
template <class Mass>
Edge find_edge(uint64_t* keys, int64_t count, uint64_t least, uint64_t most, double goal, const Mass& mass) {
  constexpr int kRanges = 1024;
  double before = 0;
  while (least != most) {
    int shift = 0;
    while ((most - least) >> shift >= kRanges) ++shift;
    double sums[kRanges] = {};
    for (int64_t i = 0; i < count; ++i) sums[(keys[i] - least) >> shift] += mass(keys[i]);
    uint64_t range = 0;
    double above = before;
    for (uint64_t r = ((most - least) >> shift) + 1; r-- > 0 && before < goal;) {
      if (sums[r] <= 0) continue;
      range = r;
      above = before;
      before += sums[r];
    }
    before = above;
    int64_t kept = 0;
    const uint64_t first = least;
    least = ~uint64_t{0};
    most = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = keys[i];
      if ((key - first) >> shift != range) continue;
      keys[kept++] = key;
      least = std::min(least, key);
      most = std::max(most, key);
    }
    count = kept;
  }
  return {least, before};
}

// One row with its greatest logit.
struct Row {
  const KernelTable& kernels;
  const float* x;
  int64_t vocab, blocks;
  Room room;
  float top;

  // The k-th greatest of `count` keys that are not below that of `least`.
  float kth_key(int64_t count, float least, double k) const {
    return logit_of(find_edge(room.keys, count, key_of(least), key_of(top), k, [](uint64_t) { return 1.0; }).key);
  }

  // The tokens from `least` on, in room.ids; returns how many.
  int64_t list(float least) const { return kernels.tokens_from(x, vocab, room.maxima, least, room.ids); }

  // The same as keys.
  int64_t list_keys(float least) const {
    const int64_t count = list(least);
    for (int64_t i = 0; i < count; ++i) room.keys[i] = key_of(x[room.ids[i]]);
    return count;
  }

  // The k-th greatest logit, 1 <= k <= V.
  float kth(int64_t k) const {
    float least = -kInfinity;
    if (k <= blocks) {
      for (int64_t b = 0; b < blocks; ++b) room.keys[b] = key_of(room.maxima[b]);
      least = kth_key(blocks, least, static_cast<double>(k));
    } else if (vocab > 4 * kSampled) {
      const int64_t stride = vocab / kSampled;
      for (int64_t i = 0; i < kSampled; ++i) room.keys[i] = key_of(x[i * stride]);
      const double share = static_cast<double>(k) / static_cast<double>(vocab) * kSampled;
      if (1.5 * share + 64 < kSampled) least = kth_key(kSampled, least, 1.5 * share + 64);
    }
    int64_t count = list_keys(least);
    if (count < k) count = list_keys(least = -kInfinity);
    return kth_key(count, least, static_cast<double>(k));
  }

  // Weights of logits from `least` on. The bits of `least` are raised to where the exponent reaches that of `floor`,
  // less what rounding may hide: the exponent never falls when the logit rises.
  WeightSpec spec(double scale, double floor, float least) const {
    const double lowest = std::log2(floor) - 1e-12;
    uint64_t below = key_of(-kInfinity), from = key_of(top);
    while (from - below > 1) {
      const uint64_t middle = (below + from) / 2;
      ((static_cast<double>(logit_of(middle)) - static_cast<double>(top)) * scale >= lowest ? from : below) = middle;
    }
    return {top, std::max(least, logit_of(from)), scale, floor};
  }

  double sum(const WeightSpec& spec) const {
    kernels.weight_sums(x, vocab, room.maxima, spec, room.sums);
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b) total += room.sums[b];
    return total;
  }
};

// The tokens of a row that are as good as its top_k-th, at least: token ids[i] has logit x[i]. All others count as
// impossible, so that what is summed is summed as in the whole row, zeros aside. What is listed are places in x.
struct Candidates : Row {
  const int32_t* ids;  // ascending
  int64_t count;

  int64_t list(float least) const {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i)
      if (x[i] >= least) room.ids[found++] = static_cast<int32_t>(i);
    return found;
  }

  float kth(int64_t k) const {
    for (int64_t i = 0; i < count; ++i) room.keys[i] = key_of(x[i]);
    return kth_key(count, -kInfinity, static_cast<double>(k));
  }

  // Block after block in the lanes of weight_sums (sampling.inl). Leaves weights, and of the blocks that have
  // candidates sums, zeros behind the last, and in room.ids where they begin, and `count` behind the last.
  double sum(const WeightSpec& spec) const {
    kernels.token_weights(x, count, spec, room.weights);
    std::fill_n(room.sums, count, 0.0);
    double total = 0;
    int64_t b = 0;
    for (int64_t i = 0; i < count; ++b) {
      room.ids[b] = static_cast<int32_t>(i);
      const int32_t block = ids[i] / kSampleBlock;
      double u[16] = {};
      for (; i < count && ids[i] / kSampleBlock == block; ++i) u[ids[i] % 16] += room.weights[i];
      for (int lane = 0; lane < 8; ++lane) u[lane] += u[lane + 8];
      total += room.sums[b] = ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
    }
    room.ids[b] = static_cast<int32_t>(count);
    return total;
  }
};

// The first item at which the running sum, from `before` on, exceeds `goal`; the last one of positive weight where none
// does.
int64_t reach(const double* weights, int64_t count, double before, double goal) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] <= 0) continue;
    last = i;
    before += weights[i];
    if (before > goal) break;
  }
  return last;
}

// The block in which the running sum exceeds `goal`, or the last one with a sum, and the sum of those before it.
struct Place {
  int64_t block;
  double before;
};
Place find_block(const double* sums, int64_t blocks, double goal) {
  Place place{0, 0};
  double total = 0;
  for (int64_t b = 0; b < blocks && total <= goal; ++b) {
    if (sums[b] <= 0) continue;
    place = {b, total};
    total += sums[b];
  }
  return place;
}

// One of all tokens that have a weight: first the block, then the token in it.
int64_t pick_of_all(const Row& row, const WeightSpec& spec, double uniform) {
  const double goal = uniform * row.sum(spec);
  const Place place = find_block(row.room.sums, row.blocks, goal);
  double weights[kSampleBlock];
  const int64_t first = place.block * kSampleBlock, count = std::min<int64_t>(kSampleBlock, row.vocab - first);
  row.kernels.token_weights(row.x + first, count, spec, weights);
  return first + reach(weights, count, place.before, goal);
}

int64_t pick_of_all(const Candidates& row, const WeightSpec& spec, double uniform) {
  const double goal = uniform * row.sum(spec);
  const Place place = find_block(row.room.sums, row.count, goal);
  const int64_t first = row.room.ids[place.block], count = row.room.ids[place.block + 1] - first;
  return first + reach(row.room.weights + first, count, place.before, goal);
}

// The same of a list of weights, of which those below `least` become 0; one at least must stay.
int64_t pick_of_list(double* weights, int64_t count, double least, double uniform, double* sums) {
  const int64_t blocks = (count + kSampleBlock - 1) / kSampleBlock;
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = std::min(count, (b + 1) * kSampleBlock);
    double lanes[4] = {};
    const auto add = [&](int64_t i, int lane) {
      weights[i] = weights[i] >= least ? weights[i] : 0.0;
      lanes[lane] += weights[i];
    };
    int64_t i = b * kSampleBlock;
    for (; i + 4 <= end; i += 4)
      for (int lane = 0; lane < 4; ++lane) add(i + lane, lane);
    for (; i < end; ++i) add(i, 0);
    sums[b] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    total += sums[b];
  }
  const double goal = uniform * total;
  const Place place = find_block(sums, blocks, goal);
  const int64_t first = place.block * kSampleBlock;
  return first + reach(weights + first, std::min<int64_t>(kSampleBlock, count - first), place.before, goal);
}

// One of the smallest set of most likely tokens that has the share top_p, less those below min_p.
template <class AnyRow> int64_t pick_of_nucleus(const AnyRow& row, WeightSpec spec, const SampleRow& wanted) {
  const double total = row.sum(spec), goal = wanted.top_p * total;
  spec = row.spec(spec.scale,
                  std::max(kImpossible, ((1.0 - wanted.top_p) - 1e-10) * total / static_cast<double>(row.vocab)),
                  spec.least);
  const Room& room = row.room;
  const int64_t found = row.list(spec.least);
  for (int64_t i = 0; i < found; ++i) room.logits[i] = row.x[room.ids[i]];
  row.kernels.token_weights(room.logits, found, spec, room.weights);
  int64_t count = 0;
  for (int64_t i = 0; i < found; ++i) {
    const double weight = room.weights[i];
    room.ids[count] = room.ids[i];
    room.weights[count] = weight;
    room.keys[count] = bits_of<uint64_t>(weight);  // ascending, as weights are positive
    count += weight > 0;
  }
  const Edge edge = find_edge(room.keys, count, bits_of<uint64_t>(spec.floor), bits_of<uint64_t>(1.0), goal,
                              [](uint64_t key) { return bits_of<double>(key); });
  const double least = bits_of<double>(edge.key);
  double held = edge.before;
  for (int64_t i = 0; i < count; ++i) {  // of equally likely tokens the lowest ids come first
    if (room.weights[i] != least) continue;
    if (held >= goal) room.weights[i] = 0;
    held += least;
  }
  return room.ids[pick_of_list(room.weights, count, std::max(least, wanted.min_p), wanted.uniform, room.sums)];
}

// Where in row.x the token is that a temperature above 0 leads to.
template <class AnyRow> int64_t draw(const AnyRow& row, const SampleRow& wanted) {
  const float least = wanted.top_k > 0 && wanted.top_k < row.vocab ? row.kth(wanted.top_k) : -kInfinity;
  // A temperature so low that its inverse is none leaves the best, whose logit is 0 above itself.
  const double scale = std::min(kLog2e / wanted.temperature, DBL_MAX);
  if (wanted.top_p < 1.0) return pick_of_nucleus(row, row.spec(scale, kImpossible, least), wanted);
  return pick_of_all(row, row.spec(scale, std::max(kImpossible, wanted.min_p), least), wanted.uniform);
}

int64_t first_bad(const float* x, int64_t vocab, bool may_be_impossible) {
  for (int64_t i = 0; i < vocab; ++i)
    if (!std::isfinite(x[i]) && !(may_be_impossible && x[i] == -kInfinity)) return i;
  return -1;
}

// Of each byte of bits: eight words, all ones where its bit is set. No branch, which random bits would mislead.
struct ByteMasks {
  uint32_t of[256][8];
  ByteMasks() {
    for (uint32_t byte = 0; byte < 256; ++byte)
      for (uint32_t i = 0; i < 8; ++i) of[byte][i] = 0u - (byte >> i & 1u);
  }
};

// x with -infinity for tokens whose bit is not set.
void mask_row(const float* x, const uint32_t* allowed, int64_t vocab, float* out) {
  static const ByteMasks masks;
  const uint32_t impossible = bits_of<uint32_t>(-kInfinity);
  for (int64_t first = 0; first < vocab; first += 32) {
    const int64_t count = std::min<int64_t>(32, vocab - first);
    const uint32_t word = allowed[first / 32];
    if (word == 0) {
      std::fill_n(out + first, count, -kInfinity);
    } else if (word == ~uint32_t{0}) {
      std::copy_n(x + first, count, out + first);
    } else {
      uint32_t bits[32] = {};
      std::memcpy(bits, x + first, sizeof(float) * static_cast<size_t>(count));
      for (int byte = 0; byte < 4; ++byte) {
        const uint32_t (&keep)[8] = masks.of[word >> (8 * byte) & 255u];
        for (int i = 0; i < 8; ++i) {
          uint32_t& one = bits[8 * byte + i];
          one = (one & keep[i]) | (impossible & ~keep[i]);
        }
      }
      std::memcpy(out + first, bits, sizeof(float) * static_cast<size_t>(count));
    }
  }
}

SamplePick pick(const KernelTable& kernels, const SampleRow& wanted, int64_t vocab, int64_t blocks, const Room& room) {
  const bool is_adjusted = wanted.adjusted != wanted.raw || wanted.allowed != nullptr;
  if (is_adjusted && kernels.block_maxima(wanted.raw, vocab, room.maxima) >= kInfinityBits)
    return {-1, first_bad(wanted.raw, vocab, false)};
  if (wanted.allowed != nullptr) mask_row(wanted.adjusted, wanted.allowed, vocab, room.masked);
  Row row{kernels, wanted.allowed != nullptr ? room.masked : wanted.adjusted, vocab, blocks, room, 0};
  const bool has_infinities = kernels.block_maxima(row.x, vocab, room.maxima) >= kInfinityBits;
  if (has_infinities && !(is_adjusted && wanted.adjusted == wanted.raw)) {  // a mask alone makes nothing bad
    const int64_t bad = first_bad(row.x, vocab, is_adjusted);
    if (bad >= 0) return {-1, bad};
  }
  const float* best = std::max_element(room.maxima, room.maxima + blocks);
  row.top = *best;
  if (row.top == -kInfinity) return {-1, 0};
  if (wanted.temperature == 0) {
    int64_t token = (best - room.maxima) * kSampleBlock;
    while (row.x[token] != row.top) ++token;
    return {token, -1};
  }
  return {draw(row, wanted), -1};
}

void score(const Row& row, int64_t id, int64_t count, float* out, int64_t* top_ids, float* top) {
  const double log_sum = std::log(row.sum(row.spec(kLog2e, kImpossible, -kInfinity)));
  const auto logprob = [&](int64_t token) {
    return static_cast<float>((static_cast<double>(row.x[token]) - static_cast<double>(row.top)) - log_sum);
  };
  *out = logprob(id);
  if (count == 0) return;
  int32_t* ids = row.room.ids;
  const float least = row.kth(count);
  const int64_t found = row.kernels.tokens_from(row.x, row.vocab, row.room.maxima, least, ids);
  std::partial_sort(ids, ids + count, ids + found,
                    [&](int32_t a, int32_t b) { return row.x[a] != row.x[b] ? row.x[a] > row.x[b] : a < b; });
  for (int64_t i = 0; i < count; ++i) {
    top_ids[i] = ids[i];
    top[i] = logprob(ids[i]);
  }
}

}  // namespace

std::vector<SamplePick> sample_rows(WorkerPool& pool, const std::vector<SampleRow>& rows, int64_t vocab) {
  std::vector<SamplePick> picks(rows.size());
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Sampling, static_cast<int64_t>(rows.size()), true);
  const bool has_lists = std::any_of(rows.begin(), rows.end(), [](const SampleRow& row) {
    return row.temperature != 0 && (row.top_k > 0 || row.top_p < 1.0);
  });
  const bool has_masks =
      std::any_of(rows.begin(), rows.end(), [](const SampleRow& row) { return row.allowed != nullptr; });
  const Rooms rooms(session, static_cast<int64_t>(rows.size()), blocks_of(vocab), has_lists ? vocab : 0,
                    has_masks ? vocab : 0);
  session.run(static_cast<int64_t>(rows.size()), [&](int64_t i, int thread) {
    const auto at = static_cast<size_t>(i);
    picks[at] = pick(session.kernels(), rows[at], vocab, rooms.blocks(), rooms.of(i, thread));
  });
  return picks;
}

std::vector<int64_t> sample_candidates(WorkerPool& pool, const std::vector<CandidateRow>& rows, int64_t vocab) {
  std::vector<int64_t> tokens(rows.size());
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Sampling, static_cast<int64_t>(rows.size()), true);
  int64_t most = 0;
  for (const CandidateRow& row : rows) most = std::max(most, row.count);
  const Rooms rooms(session, static_cast<int64_t>(rows.size()), most, most + 1, 0);
  session.run(static_cast<int64_t>(rows.size()), [&](int64_t i, int thread) {
    const auto& [wanted, ids, count] = rows[static_cast<size_t>(i)];
    const float* best = std::max_element(wanted.raw, wanted.raw + count);
    int64_t place = best - wanted.raw;  // the first of equals, which temperature 0 takes
    if (wanted.temperature != 0) {
      const Row row{session.kernels(), wanted.raw, vocab, blocks_of(vocab), rooms.of(i, thread), *best};
      place = draw(Candidates{row, ids, count}, wanted);
    }
    tokens[static_cast<size_t>(i)] = ids[place];
  });
  return tokens;
}

void token_logprobs(WorkerPool& pool, const float* logits, int64_t rows, int64_t vocab, const int64_t* ids,
                    int64_t count, float* out, int64_t* top_ids, float* top) {
  WorkerPool::Session session(pool);
  const ProfiledOp op(session, Part::Sampling, rows, true);
  const Rooms rooms(session, rows, blocks_of(vocab), count > 0 ? vocab : 0, 0);
  session.run(rows, [&](int64_t r, int thread) {
    Row row{session.kernels(), logits + r * vocab, vocab, rooms.blocks(), rooms.of(r, thread), 0};
    const bool is_finite = row.kernels.block_maxima(row.x, vocab, row.room.maxima) < kInfinityBits;
    row.top = *std::max_element(row.room.maxima, row.room.maxima + row.blocks);
    if ((is_finite || first_bad(row.x, vocab, true) < 0) && row.top != -kInfinity)
      return score(row, ids[r], count, out + r, top_ids + r * count, top + r * count);
    out[r] = NAN;
    for (int64_t i = 0; i < count; ++i) {
      top_ids[r * count + i] = i;
      top[r * count + i] = NAN;
    }
  });
}

void row_weights(WorkerPool& pool, const float* logits, int64_t vocab, double temperature, double* out) {
  WorkerPool::Session session(pool);
  const Row row{session.kernels(), logits, vocab, 0, {}, *std::max_element(logits, logits + vocab)};
  const WeightSpec spec = row.spec(std::min(kLog2e / temperature, DBL_MAX), kImpossible, -kInfinity);
  session.kernels().token_weights(logits, vocab, spec, out);
}

}  // namespace kt
