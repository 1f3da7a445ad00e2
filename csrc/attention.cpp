// Attention over a worker pool: which rows and heads go together, and whether spans of one row run in parallel.
// The arithmetic and its order are attention.inl's; nothing here changes a result.
#include <algorithm>
#include <stdexcept>

#include "ops.h"

namespace kt {
namespace {

constexpr int kMaxHeads = 16;  // query heads of a unit
constexpr int64_t kMaxPartials = int64_t{32} << 20;  // floats that spans run in parallel may hold until they are merged

// Neighbouring rows of one sequence, neighbouring query heads of one KV head.
struct Unit {
  int64_t first_row;
  int num_rows, first_head, num_heads, kv_head;
  int64_t begin, end;  // positions that any of its rows sees, begin rounded down to a span
};

std::vector<Unit> make_units(const AttentionArgs& a) {
  std::vector<Unit> units;
  const int group = a.num_heads / a.num_kv_heads, heads = std::min(group, kMaxHeads);
  for (int64_t row = 0; row < a.num_rows;) {
    const int64_t limit = std::min(a.num_rows, row + kMaxQueries / heads);
    int64_t next = row, begin = INT64_MAX, end = 0;
    for (; next < limit && a.seq_ids[next] == a.seq_ids[row]; ++next) {
      const int64_t len = a.kv_lens[next], oldest = a.window > 0 ? std::max<int64_t>(0, len - a.window) : 0;
      begin = std::min(begin, oldest / kPositionSplit * kPositionSplit);
      end = std::max(end, len);
    }
    for (int kv = 0; kv < a.num_kv_heads; ++kv)
      for (int h = 0; h < group; h += heads)
        units.push_back({row, static_cast<int>(next - row), kv * group + h, std::min(heads, group - h), kv, begin, end});
    row = next;
  }
  return units;
}

[[noreturn]] void fail(int64_t row, const std::string& what) {
  throw std::invalid_argument("attention row " + std::to_string(row) + ": " + what);
}

// Throws std::invalid_argument unless every page that a row sees is in the table and lies inside the cache.
void check_pages(const AttentionArgs& a) {
  int64_t seq = -1, from = 0, to = 0;  // pages of `seq` that are known to be good
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int64_t len = a.kv_lens[row];
    if (a.seq_ids[row] < 0 || a.seq_ids[row] >= a.num_seqs)
      fail(row, "seq_id " + std::to_string(a.seq_ids[row]) + " is no row of block_table");
    if (len < 0 || len > a.max_pages * a.page_size) fail(row, "kv_len " + std::to_string(len) + " does not fit in block_table");
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, len - a.window) : 0;
    const int64_t first = oldest / a.page_size, last = (len + a.page_size - 1) / a.page_size;
    if (a.seq_ids[row] != seq || first < from || first > to) {
      seq = a.seq_ids[row];
      from = to = first;
    }
    for (; to < last; ++to) {
      const int64_t page = a.block_table[seq * a.table_stride + to];
      if (page < 0 || (page + 1) * a.page_size > a.num_slots)
        fail(row, "page " + std::to_string(page) + " of block_table lies outside a cache of " + std::to_string(a.num_slots) + " slots");
    }
  }
}

// Maximum, sum and output of every query of a unit.
struct Partial {
  float *max, *sum, *out;
};

Partial partial_at(float* memory, int64_t queries) {
  return {memory, memory + queries, memory + 2 * queries};
}

int64_t partial_size(int64_t queries, int dim_v) { return queries * (dim_v + 2); }

AttentionSpan span_of(const Unit& u, int64_t begin) {
  return {u.first_row, u.num_rows, u.first_head, u.num_heads, u.kv_head, begin, std::min(begin + kPositionSplit, u.end)};
}

void clear(const Partial& total, int64_t queries) {
  for (int64_t i = 0; i < queries; ++i) total.sum[i] = 0.0f;
}

void merge(const KernelTable& kernels, const Partial& total, const Partial& part, int64_t queries, int dim_v) {
  for (int64_t i = 0; i < queries; ++i)
    kernels.attention_merge(total.max + i, total.sum + i, total.out + i * dim_v, part.max[i], part.sum[i], part.out + i * dim_v, dim_v);
}

void finish(const KernelTable& kernels, const AttentionArgs& a, const Unit& u, const Partial& total) {
  for (int r = 0; r < u.num_rows; ++r)
    for (int h = 0; h < u.num_heads; ++h) {
      const int i = r * u.num_heads + h, head = u.first_head + h;
      kernels.attention_finish(total.max[i], total.sum[i], total.out + static_cast<int64_t>(i) * a.dim_v, a.sinks ? a.sinks + head : nullptr,
                               a.dim_v, a.out + ((u.first_row + r) * a.num_heads + head) * a.dim_v);
    }
}

// Every unit is one task that walks its spans.
void run_by_unit(WorkerPool::Session& session, const AttentionArgs& a, const std::vector<Unit>& units) {
  const int64_t size = partial_size(kMaxQueries, a.dim_v);
  session.run(static_cast<int64_t>(units.size()), [&](int64_t i) {
    const Unit& u = units[static_cast<size_t>(i)];
    const int64_t queries = static_cast<int64_t>(u.num_rows) * u.num_heads;
    std::vector<float> memory(static_cast<size_t>(2 * size));
    const Partial total = partial_at(memory.data(), queries);
    const Partial part = partial_at(memory.data() + size, queries);
    clear(total, queries);
    for (int64_t begin = u.begin; begin < u.end; begin += kPositionSplit) {
      session.kernels().attention_span(a, span_of(u, begin), part.max, part.sum, part.out);
      merge(session.kernels(), total, part, queries, a.dim_v);
    }
    finish(session.kernels(), a, u, total);
  });
}

// Every span is a task; then every unit merges its spans.
void run_by_span(WorkerPool::Session& session, const AttentionArgs& a, const std::vector<Unit>& units) {
  struct Piece {
    size_t unit;
    int64_t begin, offset;
  };
  std::vector<Piece> pieces;
  std::vector<size_t> first_piece;
  int64_t offset = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    first_piece.push_back(pieces.size());
    const int64_t size = partial_size(static_cast<int64_t>(units[i].num_rows) * units[i].num_heads, a.dim_v);
    for (int64_t begin = units[i].begin; begin < units[i].end; begin += kPositionSplit, offset += size) pieces.push_back({i, begin, offset});
  }
  first_piece.push_back(pieces.size());
  float* memory = session.scratch<float>(offset);
  const auto queries_of = [&](const Unit& u) { return static_cast<int64_t>(u.num_rows) * u.num_heads; };
  session.run(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    const Unit& u = units[piece.unit];
    const Partial part = partial_at(memory + piece.offset, queries_of(u));
    session.kernels().attention_span(a, span_of(u, piece.begin), part.max, part.sum, part.out);
  });
  session.run(static_cast<int64_t>(units.size()), [&](int64_t i) {
    const Unit& u = units[static_cast<size_t>(i)];
    const int64_t queries = queries_of(u);
    std::vector<float> own(static_cast<size_t>(partial_size(queries, a.dim_v)));
    const Partial total = partial_at(own.data(), queries);
    clear(total, queries);
    for (size_t p = first_piece[static_cast<size_t>(i)]; p < first_piece[static_cast<size_t>(i) + 1]; ++p)
      merge(session.kernels(), total, partial_at(memory + pieces[p].offset, queries), queries, a.dim_v);
    finish(session.kernels(), a, u, total);
  });
}

}  // namespace

void attention(WorkerPool& pool, const AttentionArgs& args) {
  check_pages(args);
  WorkerPool::Session session(pool);
  const std::vector<Unit> units = make_units(args);
  int64_t longest = 0, partials = 0;
  for (const Unit& u : units) {
    longest = std::max(longest, u.end - u.begin);
    partials += ((u.end - u.begin) / kPositionSplit + 1) * partial_size(kMaxQueries, args.dim_v);
  }
  const bool enough_units = static_cast<int64_t>(units.size()) >= 4 * session.num_threads();
  if (enough_units || session.num_threads() == 1 || longest <= kPositionSplit || partials > kMaxPartials)
    run_by_unit(session, args, units);
  else
    run_by_span(session, args, units);
}

}  // namespace kt
