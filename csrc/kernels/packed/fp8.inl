// FP8 weights (e4m3fn: sign, 4 exponent bits with bias 7, 3 bits; no infinities, all ones is NaN) with one fp32 scale
// per 128 rows and 128 columns, as DeepSeek-V3's safetensors hold them, times fp32 activations as they are.
// Included by a tier file after packed.inl, whose tiles of 16 rows these are; computed with in packed form only.
//
// A tile of 16 rows and k columns (k a multiple of 4) is a head of one fp32 number per 128 columns, padded to 64 bytes:
// 256 times the scale, or NaN where one of the 16 x 128 codes is NaN; then lines of 64 bytes, 4 consecutive columns of
// 16 rows: 32 bytes of row r's first and second column at 2 r and 2 r + 1, then 32 bytes of its third and fourth.
//
// A code with its exponent and fraction moved into those of a half is the value / 256, subnormals included; fp16 to
// fp32 is exact, so w below is exact and the head's factor makes up for it. Scales from 2^120 on overflow.
//
// Every output sees these operations in this order, in every tier, for any number of tokens, on any split, for every
// 128 columns (the last block may be shorter), with 4 sums s[0..3]:
//   s = 0; for k ascending: s[k % 4] = fma(w[k], x[k], s[k % 4]);
//   acc = acc + head * ((s0 + s1) + (s2 + s3))

namespace {

constexpr int64_t kFp8Cols = kFp8Block;

inline int64_t fp8_blocks(int64_t k) { return (k + kFp8Cols - 1) / kFp8Cols; }
inline int64_t fp8_head_bytes(int64_t k) { return (fp8_blocks(k) * 4 + kHeadAlign - 1) / kHeadAlign * kHeadAlign; }
inline int fp8_cols(int64_t k, int64_t block) {
  return static_cast<int>(k - block * kFp8Cols < kFp8Cols ? k - block * kFp8Cols : kFp8Cols);
}
inline vf fp8_scale(const uint8_t* tile, int64_t block) {
  float scale;
  std::memcpy(&scale, tile + 4 * block, 4);
  return set1(scale);
}
inline vf fp8_total(vf acc, vf scale, vf s0, vf s1, vf s2, vf s3) {
  return add(acc, mul(scale, add(add(s0, s1), add(s2, s3))));
}

// The blocks of columns of a tile; packed/groups.inl has others.
struct Fp8Blocks {
  const uint8_t* packed;
  int64_t k, count;
  static constexpr int size = kFp8Block;
  explicit Fp8Blocks(const TileArgs& a) : packed(a.packed), k(a.k), count(fp8_blocks(a.k)) {}
  const uint8_t* lines() const { return packed + fp8_head_bytes(k); }
  int cols(int64_t block) const { return fp8_cols(k, block); }
  vf scale(int64_t block) const { return fp8_scale(packed, block); }
};

// C tokens from t on, straight from the lines: weights stay in registers, sums of C tokens beside them.
template <int C, class B> void fp8_few(const TileArgs& a, const B& blocks, int t) {
  const uint8_t* p = blocks.lines();
  const float* x[C];
  vf acc[C];
  for (int c = 0; c < C; ++c) {
    x[c] = a.act.x + token_row(a, t + c) * a.act.ldx;
    acc[c] = load(a.acc + (t + c) * 16);
  }
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int cols = blocks.cols(b);
    vf s[C][4];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[c][j] = zero();
    for (int k = 0; k < cols; k += 4, p += 64) {
      prefetch_line(p + kAheadPacked);
#pragma GCC unroll 2
      for (int j = 0; j < 4; j += 2) {
        vf even, odd;
        fp8_pair(p + 16 * j, &even, &odd);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
          s[c][j] = fma_(even, set1(x[c][k + j]), s[c][j]);
          s[c][j + 1] = fma_(odd, set1(x[c][k + j + 1]), s[c][j + 1]);
        }
      }
    }
    const vf scale = blocks.scale(b);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[c] = fp8_total(acc[c], scale, s[c][0], s[c][1], s[c][2], s[c][3]);
      x[c] += blocks.size;
    }
  }
  for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
}

// 128 columns as fp32, the four sums' columns apart: [column % 4][column / 4][row].
struct Fp8Stage { alignas(64) float w[4][kFp8Cols / 4][16]; };

inline const uint8_t* stage_fp8(const uint8_t* p, int cols, Fp8Stage& st) {
  for (int i = 0; i < cols / 4; ++i, p += 64) {
    prefetch_line(p + kAheadPacked);
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2) {
      vf even, odd;
      fp8_pair(p + 16 * j, &even, &odd);
      store(st.w[j][i], even);
      store(st.w[j + 1][i], odd);
    }
  }
  return p;
}

// Some of the four sums at a time, of C tokens: as many independent chains as the units for fma need, and no more than
// there are registers.
template <int C, class B>
void fp8_tokens(const TileArgs& a, const B& blocks, const Fp8Stage& st, int64_t block, int t) {
  constexpr int J = C >= 4 ? 1 : C >= 2 ? 2 : 4;
  const int steps = blocks.cols(block) / 4;
  const vf scale = blocks.scale(block);
  for (; t + C <= a.num_tokens; t += C) {
    const float* x[C];
    vf s[4][C];
    for (int c = 0; c < C; ++c) x[c] = a.act.x + token_row(a, t + c) * a.act.ldx + block * blocks.size;
    for (int first = 0; first < 4; first += J) {
      vf sum[J][C];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[j][c] = zero();
      for (int i = 0; i < steps; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
          const vf w = load(st.w[first + j][i]);
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) sum[j][c] = fma_(w, set1(x[c][4 * i + first + j]), sum[j][c]);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) s[first + j][c] = sum[j][c];
    }
    for (int c = 0; c < C; ++c) {
      float* acc = a.acc + (t + c) * 16;
      store(acc, fp8_total(load(acc), scale, s[0][c], s[1][c], s[2][c], s[3][c]));
    }
  }
  if constexpr (C > 1) fp8_tokens<(C > 6 ? fewer(C) : C - 1)>(a, blocks, st, block, t);
}

template <int C, class B> void fp8_few_tokens(const TileArgs& a, const B& blocks, int t) {
  for (; t + C <= a.num_tokens; t += C) fp8_few<C>(a, blocks, t);
  if constexpr (C > 1) fp8_few_tokens<C - 1>(a, blocks, t);
}

// Adds to a.acc.
template <class B> void fp8_blocks_tile(const TileArgs& a, const B& blocks) {
  if (a.num_tokens <= kFp8Few) return fp8_few_tokens<kFp8Few>(a, blocks, 0);
  const uint8_t* p = blocks.lines();
  Fp8Stage st;
  for (int64_t b = 0; b < blocks.count; ++b) {
    p = stage_fp8(p, blocks.cols(b), st);
    fp8_tokens<kFp8Staged>(a, blocks, st, b, 0);
  }
}
void fp8_tile(const TileArgs& a) { fp8_blocks_tile(a, Fp8Blocks(a)); }

// ---- packing ----

// 64 columns of 16 rows to 16 lines.
inline void pack_fp8_lines(const uint8_t* const* rows, int num_lines, uint8_t* out) {
  alignas(64) uint8_t words[16][16][4];  // [columns / 4][row][column % 4]
  transpose16(rows, words[0][0]);
  for (int i = 0; i < num_lines; ++i)
    for (int r = 0; r < 16; ++r) {
      std::memcpy(out + 64 * i + 2 * r, words[i][r], 2);
      std::memcpy(out + 64 * i + 32 + 2 * r, words[i][r] + 2, 2);
    }
}

inline bool has_fp8_nan(const uint8_t* p, int count) {
  int found = 0;
  for (int i = 0; i < count; ++i) found |= (p[i] & 127) == 127;
  return found != 0;
}

// scales: one per 128 columns, those of the 128 rows that the tile is of.
void pack_fp8_tile(const uint8_t* const* rows, const float* scales, int64_t k, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(fp8_head_bytes(k)));
  for (int64_t b = 0; b < fp8_blocks(k); ++b) {
    bool has_nan = false;
    for (int r = 0; r < 16; ++r) has_nan |= has_fp8_nan(rows[r] + b * kFp8Cols, fp8_cols(k, b));
    const float scale = has_nan ? __builtin_nanf("") : scales[b] * 256.0f;
    std::memcpy(out + 4 * b, &scale, 4);
  }
  uint8_t* lines = out + fp8_head_bytes(k);
  alignas(64) uint8_t last[16][64] = {};
  for (int64_t first = 0; first < k; first += 64) {
    const int cols = static_cast<int>(k - first < 64 ? k - first : 64);
    const uint8_t* from[16];
    for (int r = 0; r < 16; ++r) {
      from[r] = rows[r] + first;
      if (cols == 64) continue;
      std::memcpy(last[r], from[r], static_cast<size_t>(cols));
      from[r] = last[r];
    }
    pack_fp8_lines(from, cols / 4, lines + 16 * first);
  }
}

}  // namespace
