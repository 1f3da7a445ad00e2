// What processors with i8mm have beyond simd/neon.h, which includes this: an instruction multiplies two rows of 8
// columns with those of two tokens. Sums of many tokens are taken with it (formats/gemm.inl).
#pragma once

namespace {

// Adds the products of four rows, of which x has 4 columns and y the next 4, and two tokens: those of rows 0 and 1 to
// acc[0], in turns of tokens, those of rows 2 and 3 to acc[1].
inline void add_matrix(int32x4_t* acc, uint8x16_t x, uint8x16_t y, int8x16_t tokens) {
  const uint32x4_t first = vreinterpretq_u32_u8(x), second = vreinterpretq_u32_u8(y);
  acc[0] = vmmlaq_s32(acc[0], vreinterpretq_s8_u32(vzip1q_u32(first, second)), tokens);
  acc[1] = vmmlaq_s32(acc[1], vreinterpretq_s8_u32(vzip2q_u32(first, second)), tokens);
}
// 16 rows of 4 columns times two tokens, as multiply_registers wants them.
inline vi multiply_matrices(vi acc, wb w) {
  return each<vi>(acc, w,
                  [](auto sum, auto p) { return vmmlaq_s32(sum, vreinterpretq_s8_u8(p), vreinterpretq_s8_u8(p)); });
}
// sums[c] = the products of `STEPS` lines with tokens y[c]: sums of udot, for an even number of tokens.
template <int C, int STEPS> inline void matrix_sums(const uint8_t* lines, const int8_t* const* y, vi* sums) {
  int32x4_t acc[C / 2][8];
#pragma GCC unroll 4
  for (int c = 0; c < C / 2; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[c][i] = vdupq_n_s32(0);
#pragma GCC unroll 2
  for (int step = 0; step < STEPS; step += 2) {
    const wb first = load_wb(lines + 64 * step), second = load_wb(lines + 64 * step + 64);
#pragma GCC unroll 4
    for (int c = 0; c < C / 2; ++c) {
      const int8x16_t tokens = vcombine_s8(vld1_s8(y[2 * c] + 4 * step), vld1_s8(y[2 * c + 1] + 4 * step));
      add_matrix(acc[c], first.a, second.a, tokens);
      add_matrix(acc[c] + 2, first.b, second.b, tokens);
      add_matrix(acc[c] + 4, first.c, second.c, tokens);
      add_matrix(acc[c] + 6, first.d, second.d, tokens);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C / 2; ++c) {
    const int32x4_t* p = acc[c];
    sums[2 * c] = {vuzp1q_s32(p[0], p[1]), vuzp1q_s32(p[2], p[3]), vuzp1q_s32(p[4], p[5]), vuzp1q_s32(p[6], p[7])};
    sums[2 * c + 1] = {vuzp2q_s32(p[0], p[1]), vuzp2q_s32(p[2], p[3]), vuzp2q_s32(p[4], p[5]), vuzp2q_s32(p[6], p[7])};
  }
}

}  // namespace
