// What the machine can do at best: reading memory, and int8 products without any memory. Included by a tier file after
// packed.inl. The loops are those that the kernels would like to be.

namespace {

// Reads `bytes`, a multiple of 256; the result keeps the loop alive.
uint64_t read_lines(const uint8_t* p, int64_t bytes) {
  wb seen[4] = {load_wb(p), load_wb(p), load_wb(p), load_wb(p)};
  for (int64_t i = 0; i < bytes; i += 256)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(p + i + 64 * j + 4096);
      seen[j] = or_bytes(seen[j], load_wb(p + i + 64 * j));
    }
  alignas(64) uint8_t out[64];
  store_wb(out, or_bytes(or_bytes(seen[0], seen[1]), or_bytes(seen[2], seen[3])));
  uint64_t word;
  std::memcpy(&word, out, 8);
  return word;
}

// Products of unsigned weights and int8 activations, with sums in registers; returns how many multiplications and
// additions. Chains begin with what lies in `out` and all go into it, and every product loads its activations anew,
// from a place that the compiler does not know: it would make one of what it knows to be equal, and multiply once.
int64_t multiply_registers(int64_t rounds, int32_t* out) {
#ifdef __AVX512F__
  constexpr int kChains = 12;
#else
  constexpr int kChains = 6;  // of two registers each, of 16; on aarch64 of four, of 32
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr int kProducts = 256;
#else
  constexpr int kProducts = 128;
#endif
  alignas(64) uint8_t bytes[64];
  std::memset(bytes, 3, sizeof bytes);
  const uint8_t* weights = bytes;
  asm("" : "+r"(weights) : : "memory");
  const wb w = load_wb(weights);
  const int8_t columns[4] = {1, 0, 1, 0};
  const int8_t* y = columns;
  uacc acc[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = loadi(out + c);
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (int c = 0; c < kChains; ++c) acc[c] = multiply_matrices(acc[c], w);
#else
    for (int c = 0; c < kChains; ++c) {
      asm("" : "+r"(y));
      acc[c] = udot(acc[c], w, y);
    }
#endif
  vi total = set1i(0);
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) total = flush(total, acc[c]);
  storei(out, total);
  return rounds * kChains * kProducts;
}

// As multiply_registers, in fp32 with fused multiplications and additions. Factors of one keep the sums finite.
int64_t multiply_fp32(int64_t rounds, int32_t* out) {
#ifdef __AVX512F__
  constexpr int kChains = 12;
#else
  constexpr int kChains = 6;  // of two registers each: AVX2 has 16; of four: NEON has 32
#endif
  const vf factor = set1(1.0f);
  vf sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = from_bits(loadi(out + c));
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = fma_(factor, sums[c], factor);
  vf total = zero();
  for (const vf& sum : sums) total = add(total, sum);
  storei(out, bits(total));
  return rounds * kChains * 32;
}

}  // namespace
