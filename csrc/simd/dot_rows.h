// Dot products of staged rows of fp32 weights, for layers whose registers hold 8 columns of a row. Included by
// simd/avx2.h and simd/neon.h; each tier compiles its own copy.
#pragma once

namespace {

// Where row r, column c of a stage of 8 rows lies.
inline int stage_at(int r, int c) { return r * kFloatCols + c; }
// s[c * 8 + r] = the 8 sums of w[r] . x[c] for the 8 rows of a stage and C vectors. 4 rows at a time: with 3 vectors
// that is 12 sums, as many as AVX2's registers hold.
template <int C> inline void dot_rows8(const float* w, const float* const* x, int cols, v8* s) {
  const int full = cols / 8 * 8;
  for (int first = 0; first < 8; first += 4) {
    v8 sum[C][4];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sum[c][r] = zero8();
    const float* rows = w + stage_at(first, 0);
    const auto step = [&](int k, const auto& column) {
      v8 v[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) v[c] = column(c);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const v8 row = load8(rows + r * kFloatCols + k);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[c][r] = fma8(row, v[c], sum[c][r]);
      }
    };
    for (int k = 0; k < full; k += 8) step(k, [&](int c) { return load8(x[c] + k); });
    if (full < cols) step(full, [&](int c) { return load8_n(x[c] + full, cols - full); });
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) s[c * 8 + first + r] = sum[c][r];
  }
}

}  // namespace
