// Attention over a worker pool: which rows and heads go together, and whether spans of one row run in parallel.
// The arithmetic and its order are attention.inl's; nothing here changes a result.
#include "ops/attention/attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

constexpr int kMaxHeads = 16;       // query heads of a unit
constexpr int kWideHead = 512;      // dimensions of a key and a value: fewer of such queries stay in a cache
constexpr int kFewQueries = 48;     // of a unit where more would leave threads without work
constexpr int kUnitsPerThread = 8;  // rows see more the later they are: many units even that out
constexpr int64_t kMaxPartials = int64_t{32} << 20;  // floats that spans run in parallel may hold until they are merged

// Neighbouring rows of one sequence, neighbouring query heads of one KV head.
struct Unit {
  int64_t first_row;
  int num_rows, first_head, num_heads, kv_head;
  int64_t begin, end;  // positions that any of its rows sees, begin rounded down to a span
};

// Rows of a unit: all of them share the reading of keys and values.
int64_t rows_of_unit(const AttentionArgs& a, int heads, int64_t units_per_row, int threads) {
  const bool is_wide = a.dim_k + a.dim_v > kWideHead || (a.bf16_products && a.dim_k > kMaxBf16Dims / 2);
  int queries = is_wide ? kMaxQueries / 2 : kMaxQueries;
  const auto units = [&] { return a.num_rows * units_per_row / (queries / heads); };
  while (threads > 1 && queries > kFewQueries && units() < int64_t{kUnitsPerThread} * threads) queries /= 2;
  return queries / heads;
}

Span<Unit> make_units(WorkerPool::Session& session, const AttentionArgs& a) {
  const int group = a.num_heads / a.num_kv_heads, heads = std::min(group, kMaxHeads);
  const int64_t units_per_row = int64_t{a.num_kv_heads} * ((group + heads - 1) / heads);
  const int64_t rows = rows_of_unit(a, heads, units_per_row, session.num_threads());
  Span<Unit> units = {session.scratch<Unit>(a.num_rows * units_per_row), 0};
  for (int64_t row = 0; row < a.num_rows;) {
    const int64_t limit = std::min(a.num_rows, row + rows);
    int64_t next = row, begin = INT64_MAX, end = 0;
    for (; next < limit && a.seq_ids[next] == a.seq_ids[row]; ++next) {
      const int64_t len = a.kv_lens[next];
      begin = std::min(begin, a.oldest(len) / kPositionSplit * kPositionSplit);
      end = std::max(end, len);
    }
    for (int kv = 0; kv < a.num_kv_heads; ++kv)
      for (int h = 0; h < group; h += heads)
        units[units.count++] = {
            row, static_cast<int>(next - row), kv * group + h, std::min(heads, group - h), kv, begin, end};
    row = next;
  }
  return units;
}

[[noreturn]] void fail(int64_t row, const std::string& what) {
  throw std::invalid_argument("attention row " + std::to_string(row) + ": " + what);
}

// Maximum, sum and output of every query of a unit.
struct Partial { float *max, *sum, *out; };

Partial partial_at(float* memory, int64_t queries) { return {memory, memory + queries, memory + 2 * queries}; }

int64_t partial_size(int64_t queries, int dim_v) { return queries * (dim_v + 2); }

AttentionSpan span_of(const Unit& u, int64_t begin) {
  return {
      u.first_row, u.num_rows, u.first_head, u.num_heads, u.kv_head, begin, std::min(begin + kPositionSplit, u.end)};
}

void attend(const KernelTable& kernels, const AttentionArgs& a, const AttentionSpan& span, const Partial& to) {
  (a.bf16_products ? kernels.attention_span_bf16 : kernels.attention_span)(a, span, to.max, to.sum, to.out);
}

void clear(const Partial& total, int64_t queries) {
  for (int64_t i = 0; i < queries; ++i) total.sum[i] = 0.0f;
}

void merge(const KernelTable& kernels, const Partial& total, const Partial& part, int64_t queries, int dim_v) {
  for (int64_t i = 0; i < queries; ++i)
    kernels.attention_merge(total.max + i, total.sum + i, total.out + i * dim_v, part.max[i], part.sum[i],
                            part.out + i * dim_v, dim_v);
}

void finish(const KernelTable& kernels, const AttentionArgs& a, const Unit& u, const Partial& total) {
  for (int r = 0; r < u.num_rows; ++r)
    for (int h = 0; h < u.num_heads; ++h) {
      const int i = r * u.num_heads + h, head = u.first_head + h;
      kernels.attention_finish(total.max[i], total.sum[i], total.out + static_cast<int64_t>(i) * a.dim_v,
                               a.sinks ? a.sinks + head : nullptr, a.dim_v,
                               a.out + ((u.first_row + r) * a.num_heads + head) * a.dim_v);
    }
}

// Every unit is one task that walks its spans.
void run_by_unit(WorkerPool::Session& session, const AttentionArgs& a, Span<Unit> units) {
  const int64_t size = partial_size(kMaxQueries, a.dim_v);
  float* of_threads = session.scratch<float>(session.num_threads() * 2 * size);
  session.run(units.count, [&](int64_t i, int thread) {
    const Unit& u = units[i];
    const int64_t queries = static_cast<int64_t>(u.num_rows) * u.num_heads;
    float* memory = of_threads + thread * 2 * size;
    const Partial total = partial_at(memory, queries);
    const Partial part = partial_at(memory + size, queries);
    clear(total, queries);
    for (int64_t begin = u.begin; begin < u.end; begin += kPositionSplit) {
      attend(session.kernels(), a, span_of(u, begin), part);
      merge(session.kernels(), total, part, queries, a.dim_v);
    }
    finish(session.kernels(), a, u, total);
  });
}

// Every span is a task; then every unit merges its spans.
void run_by_span(WorkerPool::Session& session, const AttentionArgs& a, Span<Unit> units) {
  struct Piece { int64_t unit, begin, offset; };
  int64_t most = 0;
  for (const Unit& u : units) most += std::max<int64_t>(0, u.end - u.begin) / kPositionSplit + 1;
  Span<Piece> pieces = {session.scratch<Piece>(most), 0};
  const Span<int64_t> first_piece = session.span<int64_t>(units.count + 1);
  int64_t offset = 0;
  for (int64_t i = 0; i < units.count; ++i) {
    first_piece[i] = pieces.count;
    const int64_t size = partial_size(static_cast<int64_t>(units[i].num_rows) * units[i].num_heads, a.dim_v);
    for (int64_t begin = units[i].begin; begin < units[i].end; begin += kPositionSplit, offset += size)
      pieces[pieces.count++] = {i, begin, offset};
  }
  first_piece[units.count] = pieces.count;
  float* memory = session.scratch<float>(offset);
  const int64_t own_size = partial_size(kMaxQueries, a.dim_v);
  float* of_threads = session.scratch<float>(session.num_threads() * own_size);
  const auto queries_of = [&](const Unit& u) { return static_cast<int64_t>(u.num_rows) * u.num_heads; };
  session.run(pieces.count, [&](int64_t i) {
    const Piece& piece = pieces[i];
    const Unit& u = units[piece.unit];
    const Partial part = partial_at(memory + piece.offset, queries_of(u));
    attend(session.kernels(), a, span_of(u, piece.begin), part);
  });
  session.run(units.count, [&](int64_t i, int thread) {
    const Unit& u = units[i];
    const int64_t queries = queries_of(u);
    const Partial total = partial_at(of_threads + thread * own_size, queries);
    clear(total, queries);
    for (int64_t p = first_piece[i]; p < first_piece[i + 1]; ++p)
      merge(session.kernels(), total, partial_at(memory + pieces[p].offset, queries), queries, a.dim_v);
    finish(session.kernels(), a, u, total);
  });
}

}  // namespace

void check_pages(const AttentionArgs& a) {
  int64_t seq = -1, from = 0, to = 0;  // pages of `seq` that are known to be good
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int64_t len = a.kv_lens[row];
    if (a.seq_ids[row] < 0 || a.seq_ids[row] >= a.num_seqs)
      fail(row, "seq_id " + std::to_string(a.seq_ids[row]) + " is no row of block_table");
    if (len < 0 || len > a.max_pages * a.page_size)
      fail(row, "kv_len " + std::to_string(len) + " does not fit in block_table");
    const int64_t first = a.oldest(len) / a.page_size, last = (len + a.page_size - 1) / a.page_size;
    if (a.seq_ids[row] != seq || first < from || first > to) {
      seq = a.seq_ids[row];
      from = to = first;
    }
    for (; to < last; ++to) {
      const int64_t page = a.block_table[seq * a.table_stride + to];
      if (page < 0 || (page + 1) * a.page_size > a.num_slots)
        fail(row, "page " + std::to_string(page) + " of block_table lies outside a cache of " +
                      std::to_string(a.num_slots) + " slots");
    }
  }
}

void attention(WorkerPool& pool, const AttentionArgs& args) {
  check_pages(args);
  if (args.bf16_products && (args.kv_type != KvType::BF16 || args.dim_k > kMaxBf16Dims))
    throw std::invalid_argument("products of bf16 are of keys and values in bf16, of up to " +
                                std::to_string(kMaxBf16Dims) + " dimensions");
  WorkerPool::Session session(pool);
  ProfiledOp op(session, Part::Attention, args.num_rows, true);
  const Span<Unit> units = make_units(session, args);
  const int64_t position = (args.dim_k + args.dim_v) * kv_bytes(args.kv_type);
  int64_t longest = 0, partials = 0;
  for (const Unit& u : units) {
    longest = std::max(longest, u.end - u.begin);
    op.add_bytes(std::max<int64_t>(0, u.end - u.begin) * position);
    partials += ((u.end - u.begin) / kPositionSplit + 1) * partial_size(int64_t{u.num_rows} * u.num_heads, args.dim_v);
  }
  const bool enough_units = units.count >= 4 * session.num_threads();
  if (enough_units || session.num_threads() == 1 || longest <= kPositionSplit || partials > kMaxPartials)
    run_by_unit(session, args, units);
  else
    run_by_span(session, args, units);
}

}  // namespace kt
