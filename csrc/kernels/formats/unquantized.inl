// Products with unquantized weights: (1) in gemm.inl. Included by a tier file before that one, which has what is here
// in common with it.

namespace {

constexpr int kFewTokens = 4;  // up to here staging costs more than it saves

// How many tokens at a time once fewer than `count` are left: big steps first, so that few go one by one.
constexpr int fewer(int count) { return count > 8 ? 8 : count > 4 ? 4 : count > 2 ? 2 : 1; }

inline int64_t token_row(const TileArgs& a, int t) { return a.token_ids ? a.token_ids[t] : a.first_token + t; }

struct FloatStage {
  alignas(64) float w[8 * kFloatCols];  // 8 rows, see stage_at; zeros up to a multiple of 8 columns
};

// 8 columns of a row, the first n of which exist; nothing behind them is read.
template <QType TYPE> inline v8 load_up_to_8(const uint8_t* p, int n) {
  if (n >= 8) return load_weights8<TYPE>(p);
  alignas(32) uint8_t copy[32] = {};
  std::memcpy(copy, p, static_cast<size_t>(n) * (TYPE == QType::F32 ? 4 : 2));
  return load_weights8<TYPE>(copy);
}

template <QType TYPE> void stage_float(const uint8_t* const* rows, int64_t first, int cols, FloatStage& st) {
  constexpr int bytes = TYPE == QType::F32 ? 4 : 2;
  for (int r = 0; r < 8; ++r)
    for (int c = 0; c < cols; c += 8)
      store8(st.w + stage_at(r, c), load_up_to_8<TYPE>(rows[r] + (first + c) * bytes, cols - c));
}

// The 8 rows that are staged next: fetched bit by bit while the tokens of the present ones are at work.
struct NextRows {
  const uint8_t* const* rows;  // nullptr: none
  int64_t at;                  // byte offset
  int lines_per_row, per_token, done;

  void fetch(int tokens) {
    if (rows == nullptr) return;
    for (int i = 0; i < tokens * per_token && done < 8 * lines_per_row; ++i, ++done)
      __builtin_prefetch(rows[done / lines_per_row] + at + done % lines_per_row * 64, 0, 2);
  }
};

template <int C>
void float_tokens(const TileArgs& a, const FloatStage& st, int64_t first, int cols, float* acc, NextRows& next, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const float* x[C];
    v8 s[C * 8];
    next.fetch(C);
    for (int c = 0; c < C; ++c) x[c] = a.act.x + token_row(a, t + c) * a.act.ldx + first;
    dot_rows8<C>(st.w, x, cols, s);
    for (int c = 0; c < C; ++c) reduce8_add(s + c * 8, acc + (t + c) * 16);
  }
  if constexpr (C > 1) float_tokens<fewer(C)>(a, st, first, cols, acc, next, t);
}

// Asks for 32 columns of 4 rows that are read kRowAhead bytes behind `offset`, or, past the rows' ends, for those of
// the next 4: rows are read to their ends, four side by side, and the hardware's prefetcher stops where a page ends.
constexpr int64_t kRowAhead = 6144;
template <QType TYPE>
inline void prefetch_4(const uint8_t* const* rows, int64_t offset, int64_t row_bytes, int64_t stride) {
  int64_t at = offset + kRowAhead;
  if (at >= row_bytes) at += 4 * stride - row_bytes;
  for (int r = 0; r < 4; ++r) {
    const auto* p = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(rows[r]) + static_cast<uintptr_t>(at));
    prefetch_line(p);
    if constexpr (TYPE == QType::F32) prefetch_line(p + 64);
  }
}

// 4 rows times C tokens, without a stage. ASKS: memory in front is asked for.
template <QType TYPE, int C, bool ASKS>
inline void float_few4(const TileArgs& a, const uint8_t* const* rows, int64_t first, const float* const* x, int cols,
                       v8 (*s)[8]) {
  constexpr int bytes = TYPE == QType::F32 ? 4 : 2;
  const uint8_t* p[4];
  v8 sum[C][4];
  for (int r = 0; r < 4; ++r) p[r] = rows[r] + first * bytes;
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < 4; ++r) sum[c][r] = zero8();
  const auto step = [&](const auto& row, const auto& columns) {
    v8 v[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) v[c] = columns(x[c] + first);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const v8 w = row(p[r]);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) sum[c][r] = fma8(w, v[c], sum[c][r]);
    }
  };
  const auto whole_step = [&](int k) {
    step([k](const uint8_t* row) { return load_weights8<TYPE>(row + k * bytes); },
         [k](const float* columns) { return load8(columns + k); });
  };
  int k = 0;
  for (; k + 32 <= cols; k += 32) {
    if constexpr (ASKS) prefetch_4<TYPE>(rows, (first + k) * bytes, a.k * bytes, a.rows[1] - a.rows[0]);
#pragma GCC unroll 4
    for (int i = 0; i < 32; i += 8) whole_step(k + i);
  }
  for (; k + 8 <= cols; k += 8) whole_step(k);
  if (k < cols)
    step([k, cols](const uint8_t* row) { return load_up_to_8<TYPE>(row + k * bytes, cols - k); },
         [k, cols](const float* columns) { return load8_n(columns + k, cols - k); });
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < 4; ++r) s[c][r] = sum[c][r];
}

constexpr int kFewChunks = 8;

// C tokens from t on, and up to kFewChunks chunks from `start` of 4 rows before the next 4: long runs of memory, which
// the prefetcher needs.
template <QType TYPE, int C>
void float_few_tokens(const TileArgs& a, const uint8_t* const* rows, int64_t start, int t, float* acc) {
  v8 s[kFewChunks][C][8];
  const float* x[C];
  for (int c = 0; c < C; ++c) x[c] = a.act.x + token_row(a, t + c) * a.act.ldx;
  int count = 0;
  for (int r = 0; r < 8; r += 4) {
    count = 0;
    for (int64_t first = start; first < a.k && count < kFewChunks; first += kFloatCols, ++count) {
      const int cols = static_cast<int>(a.k - first < kFloatCols ? a.k - first : kFloatCols);
      v8 sums[C][8];
      if (t == 0)
        float_few4<TYPE, C, true>(a, rows + r, first, x, cols, sums);
      else
        float_few4<TYPE, C, false>(a, rows + r, first, x, cols, sums);
      for (int c = 0; c < C; ++c)
        for (int i = 0; i < 4; ++i) s[count][c][r + i] = sums[c][i];
    }
  }
  for (int n = 0; n < count; ++n)
    for (int c = 0; c < C; ++c) reduce8_add(s[n][c], acc + (t + c) * 16);
}

template <QType TYPE> void float_few(const TileArgs& a, const uint8_t* const* rows, float* acc) {
  for (int64_t start = 0; start < a.k; start += kFewChunks * kFloatCols) {
    int t = 0;
    for (; t + 2 <= a.num_tokens; t += 2) float_few_tokens<TYPE, 2>(a, rows, start, t, acc);
    if (t < a.num_tokens) float_few_tokens<TYPE, 1>(a, rows, start, t, acc);
  }
}

template <QType TYPE> void float_tile(const TileArgs& a) {
  if (a.num_tokens <= kFewTokens) {
    float_few<TYPE>(a, a.rows, a.acc);
    float_few<TYPE>(a, a.rows + 8, a.acc + 8);
    return;
  }
  constexpr int bytes = TYPE == QType::F32 ? 4 : 2;
  FloatStage st;
  for (int64_t first = 0; first < a.k; first += kFloatCols)
    for (int half = 0; half < 2; ++half) {  // the second time, this chunk of the tokens is in the second-level cache
      const int cols = static_cast<int>(a.k - first < kFloatCols ? a.k - first : kFloatCols);
      stage_float<TYPE>(a.rows + 8 * half, first, cols, st);
      const int64_t next_first = half == 0 ? first : first + kFloatCols;
      const int lines = static_cast<int>((a.k - next_first < kFloatCols ? a.k - next_first : kFloatCols) * bytes / 64);
      NextRows next = {lines > 0 ? a.rows + 8 * (1 - half) : nullptr, next_first * bytes, lines,
                       8 * lines / a.num_tokens + 1, 0};
      float_tokens<kFloatTokens>(a, st, first, cols, a.acc + 8 * half, next, 0);
    }
}

}  // namespace
