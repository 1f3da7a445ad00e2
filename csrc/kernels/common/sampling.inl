// Passes over the logits of one row: what sampling.cpp puts together. Included by a tier file after its SIMD layer.
//
// Weights are fp64 and sums of them are taken per block of kSampleBlock tokens: lane i of 16 adds tokens i, i + 16, ...
// in ascending order, then the lanes are added pairwise. Tokens that are skipped have weight 0, which changes no sum.

namespace {

constexpr int kWeightParts = 4;  // vd computed side by side: the polynomial is one chain of products after the other

// x = 2^(x scale) for -66 <= x scale <= 0, exactly 1 for x = 0; NaN for -infinity. With n the integer nearest to the
// product and f = x scale - n, rounded once, 2^f = 1 + f q(f), q of degree 10 through Chebyshev nodes (0.09 ulp away);
// n is added to the exponent. Error below 1.5 ulp (tests/kernels/cpu/test_sampling.py).
inline void exp2_of_product(vd (&x)[kWeightParts], double scale) {
  static constexpr double kTerms[] = {7.072585949269223e-09,
                                      1.0178062445845774e-07,
                                      1.321544258792169e-06,
                                      1.525273382983612e-05,
                                      0.0001540353044173605,
                                      0.0013333558146416936,
                                      0.009618129107606888,
                                      0.0555041086648216,
                                      0.24022650695910097,
                                      0.6931471805599453,
                                      1.0};
  const vd magic = setd(6755399441055744.0);  // 1.5 * 2^52: adding it leaves the integer in the lowest bits
  vd t[kWeightParts], f[kWeightParts], q[kWeightParts];
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts; ++i) {
    t[i] = fmad(x[i], setd(scale), magic);
    f[i] = fmad(x[i], setd(scale), subd(magic, t[i]));
    q[i] = setd(4.4549605981865186e-10);
  }
#pragma GCC unroll 16
  for (const double term : kTerms)
#pragma GCC unroll 8
    for (int i = 0; i < kWeightParts; ++i) q[i] = fmad(q[i], f[i], setd(term));
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts; ++i) x[i] = add_exponent(q[i], t[i]);
}

inline vf minus_infinity() { return set1(-__builtin_inff()); }

// Up to 16 logits; lanes behind the last are impossible.
inline vf load_logits(const float* x, int64_t n) {
  if (n >= 16) return load(x);
  return select(lane_range(0, static_cast<int>(n)), load_n(x, static_cast<int>(n)), minus_infinity());
}

// The weights of kWeightParts * 8 tokens.
inline void weigh(const vf* x, const WeightSpec& spec, vd (&w)[kWeightParts]) {
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts / 2; ++i)
    widen(select(less(x[i], set1(spec.least)), minus_infinity(), x[i]), &w[2 * i], &w[2 * i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts; ++i) w[i] = subd(w[i], setd(spec.top));
  exp2_of_product(w, spec.scale);
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts; ++i) w[i] = keep_from(w[i], setd(spec.floor));
}
constexpr int kWeightStep = kWeightParts * 8;

inline void weigh(const float* p, int64_t n, const WeightSpec& spec, vd (&w)[kWeightParts]) {
  vf x[kWeightParts / 2];
#pragma GCC unroll 8
  for (int i = 0; i < kWeightParts / 2; ++i)
    x[i] = n >= kWeightStep ? load(p + 16 * i) : n > 16 * i ? load_logits(p + 16 * i, n - 16 * i) : minus_infinity();
  weigh(x, spec, w);
}

inline int64_t sample_blocks(int64_t n) { return (n + kSampleBlock - 1) / kSampleBlock; }

// The greatest logit of every block, and, returned, the bits of the greatest absolute value: 0x7f800000 for an
// infinity, more for a NaN, in whose presence maxima mean nothing.
int32_t block_maxima(const float* x, int64_t n, float* maxima) {
  const vi magnitude = set1i(0x7fffffff);
  vi most = set1i(0);
  for (int64_t b = 0; b < sample_blocks(n); ++b) {
    const float* p = x + b * kSampleBlock;
    const int64_t count = n - b * kSampleBlock;
    vf best = minus_infinity();
    if (count >= kSampleBlock) {
      for (int i = 0; i < kSampleBlock; i += 16) {
        const vf v = load(p + i);
        best = max_(best, v);
        most = maxi(most, andi(bits(v), magnitude));
      }
    } else {
      for (int64_t i = 0; i < count; i += 16) {
        best = max_(best, load_logits(p + i, count - i));
        const vf v = count - i >= 16 ? load(p + i) : load_n(p + i, static_cast<int>(count - i));
        most = maxi(most, andi(bits(v), magnitude));
      }
    }
    maxima[b] = reduce_max(best);
  }
  return reduce_maxi(most);
}

void token_weights(const float* x, int64_t n, const WeightSpec& spec, double* out) {
  alignas(64) double last[kWeightStep];
  for (int64_t i = 0; i < n; i += kWeightStep) {
    vd w[kWeightParts];
    weigh(x + i, n - i, spec, w);
    double* to = n - i >= kWeightStep ? out + i : last;
    for (int j = 0; j < kWeightParts; ++j) stored(to + 8 * j, w[j]);
    if (to == last) std::memcpy(out + i, last, sizeof(double) * static_cast<size_t>(n - i));
  }
}

// The sum of the weights of every block.
void weight_sums(const float* x, int64_t n, const float* maxima, const WeightSpec& spec, double* sums) {
  for (int64_t b = 0; b < sample_blocks(n); ++b) {
    sums[b] = 0;
    if (maxima[b] < spec.least) continue;
    const float* p = x + b * kSampleBlock;
    const int64_t count = n - b * kSampleBlock < kSampleBlock ? n - b * kSampleBlock : kSampleBlock;
    vd sum[2] = {setd(0.0), setd(0.0)};
    for (int64_t i = 0; i < count; i += kWeightStep) {
      vd w[kWeightParts];
      weigh(p + i, count - i, spec, w);
#pragma GCC unroll 8
      for (int j = 0; j < kWeightParts; ++j) sum[j % 2] = addd(sum[j % 2], w[j]);
    }
    alignas(64) double u[8];
    stored(u, addd(sum[0], sum[1]));
    sums[b] = ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
  }
}

// Writes the tokens whose logit is not below `least`, ascending, and returns how many there are.
int64_t tokens_from(const float* x, int64_t n, const float* maxima, float least, int32_t* ids) {
  const vf edge = set1(least);
  int64_t found = 0;
  for (int64_t b = 0; b < sample_blocks(n); ++b) {
    if (maxima[b] < least) continue;
    const int64_t end = (b + 1) * kSampleBlock < n ? (b + 1) * kSampleBlock : n;
    for (int64_t i = b * kSampleBlock; i < end; i += 64) {
      uint64_t hits = 0;
      for (int j = 0; j < 64 && i + j < end; j += 16) {
        const int64_t left = end - i - j;
        const uint64_t lanes = left >= 16 ? 0xffffu : (1u << left) - 1u;
        hits |= (~static_cast<uint64_t>(mask_bits(less(load_logits(x + i + j, left), edge))) & lanes) << j;
      }
      for (; hits != 0; hits &= hits - 1) ids[found++] = static_cast<int32_t>(i + __builtin_ctzll(hits));
    }
  }
  return found;
}

}  // namespace
