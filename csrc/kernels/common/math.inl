// Elementary functions on 16 lanes. Every tier runs this very sequence of operations, so results are equal bit for bit.
// Included by a tier file after its SIMD layer. Errors below were measured against float64
// (tests/kernels/cpu/test_rows.py).

namespace {

// 2^(n ln2 + r) without its factor 2^n. Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, which then
// stands in the lower bits of `shifted`.
inline vf exp_mantissa(vf x, vf* shifted, vf* n) {
  const vf magic = set1(12582912.0f);
  *shifted = fma_(x, set1(1.44269504088896341f), magic);
  *n = sub(*shifted, magic);
  vf r = fma_(*n, set1(-0.693359375f), x);
  r = fma_(*n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma_(p, r, set1(1.3981999507e-3f));
  p = fma_(p, r, set1(8.3334519073e-3f));
  p = fma_(p, r, set1(4.1665795894e-2f));
  p = fma_(p, r, set1(1.6666665459e-1f));
  p = fma_(p, r, set1(5.0000001201e-1f));
  return add(fma_(p, mul(r, r), r), set1(1.0f));
}

constexpr float kLeastExponent = -87.33654f;  // below, exp(x) is subnormal

// exp(x). Cody and Waite reduction x = n ln2 + r, |r| <= ln2 / 2, then a degree-6 polynomial; error below 1.5 ulp.
// Below -87.33654 (where the result would be subnormal) it returns 0, above 88.72283 infinity; NaN gives NaN.
inline vf exp_(vf x) {
  const vf lo = set1(kLeastExponent), hi = set1(88.72283f);
  vf shifted, n;
  const vf y = exp_mantissa(min_(max_(x, lo), hi), &shifted, &n);  // a NaN becomes lo here and is put back below
  // 2^n in two factors, so that n = 128 does not overflow before the product is known.
  const vi whole = to_int(n), half = to_int(mul(n, set1(0.5f)));
  const vf scale1 = from_bits(shl<23>(addi(half, set1i(127))));
  const vf scale2 = from_bits(shl<23>(addi(subi(whole, half), set1i(127))));
  vf result = mul(mul(y, scale1), scale2);
  result = select(less(x, lo), zero(), result);
  result = select(less(hi, x), set1(__builtin_inff()), result);
  return select(unordered(x), x, result);
}

// exp_(x), the same bits, for x <= 0 and NaN: n is added to the exponent of a result that is known to be normal.
inline vf exp_negative(vf x) {
  const vf lo = set1(kLeastExponent);
  vf shifted, n;
  const vf y = exp_mantissa(max_(x, lo), &shifted, &n);
  const vf result = from_bits(addi(bits(y), shl<23>(bits(shifted))));
  return select(unordered(x), x, select(less(x, lo), zero(), result));
}

inline vf abs_(vf x) { return from_bits(andi(bits(x), set1i(0x7fffffff))); }
inline vf copy_sign(vf magnitude, vf sign) {
  return from_bits(
      ori(andi(bits(magnitude), set1i(0x7fffffff)), andi(bits(sign), set1i(static_cast<int32_t>(0x80000000u)))));
}

inline vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exp_(sub(zero(), x)))); }

// log(1 + exp(x)) = max(x, 0) + 2 atanh(y / (2 + y)) with y = exp(-|x|): the series of atanh up to s^15, s <= 1/3,
// leaves out 2e-9 of it. Error below 3 ulp.
inline vf softplus(vf x) {
  const vf y = exp_(sub(zero(), abs_(x)));
  const vf s = div(y, add(y, set1(2.0f))), z = mul(s, s);
  vf p = set1(1.0f / 15.0f);
  p = fma_(p, z, set1(1.0f / 13.0f));
  p = fma_(p, z, set1(1.0f / 11.0f));
  p = fma_(p, z, set1(1.0f / 9.0f));
  p = fma_(p, z, set1(1.0f / 7.0f));
  p = fma_(p, z, set1(1.0f / 5.0f));
  p = fma_(p, z, set1(1.0f / 3.0f));
  const vf tail = mul(add(s, s), fma_(p, z, set1(1.0f)));
  return select(unordered(x), x, add(max_(x, zero()), tail));
}

// tanh(x): x P(x^2) below 0.625, 1 - 2 / (exp(2x) + 1) above; error below 3 ulp.
inline vf tanh_(vf x) {
  const vf a = abs_(x), z = mul(x, x);
  vf p = set1(-5.664775356e-3f);
  p = fma_(p, z, set1(2.059567996e-2f));
  p = fma_(p, z, set1(-5.372267934e-2f));
  p = fma_(p, z, set1(1.333115016e-1f));
  p = fma_(p, z, set1(-3.333326164e-1f));
  p = fma_(p, z, set1(9.999999962e-1f));
  const vf tail = sub(set1(1.0f), div(set1(2.0f), add(exp_(add(a, a)), set1(1.0f))));
  return select(less(a, set1(0.625f)), mul(p, x), copy_sign(tail, x));
}

// erfc(z) for z >= 0: 1 - z P(z^2) below 1, exp(-z^2) Q(1 / (1 + z / 2)) above.
inline vf erfc_(vf z) {
  const vf z2 = mul(z, z);
  vf p = set1(7.882497111e-5f);
  p = fma_(p, z2, set1(-8.018854992e-4f));
  p = fma_(p, z2, set1(5.189311943e-3f));
  p = fma_(p, z2, set1(-2.685432880e-2f));
  p = fma_(p, z2, set1(1.128359746e-1f));
  p = fma_(p, z2, set1(-3.761262690e-1f));
  p = fma_(p, z2, set1(1.128379166e+0f));
  const vf t = div(set1(1.0f), fma_(z, set1(0.5f), set1(1.0f)));
  vf q = set1(7.338686550e-2f);
  q = fma_(q, t, set1(-1.603549827e-1f));
  q = fma_(q, t, set1(-9.531030870e-3f));
  q = fma_(q, t, set1(1.322563135e-1f));
  q = fma_(q, t, set1(1.453501200e-1f));
  q = fma_(q, t, set1(2.566745959e-1f));
  q = fma_(q, t, set1(2.803367019e-1f));
  q = fma_(q, t, set1(2.822630618e-1f));
  q = fma_(q, t, set1(-6.718491169e-6f));
  const vf tail = mul(exp_(sub(zero(), z2)), q);
  return select(less(z, set1(1.0f)), fma_(sub(zero(), z), p, set1(1.0f)), tail);
}

inline vf gelu(vf x) {
  const vf e = erfc_(mul(abs_(x), set1(0.70710678118654752f)));
  const vf twice_cdf = select(less(x, zero()), e, sub(set1(2.0f), e));
  return mul(mul(set1(0.5f), x), twice_cdf);
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), which keeps its relative accuracy for negative x.
inline vf gelu_tanh(vf x) {
  const vf inner = fma_(mul(mul(x, x), x), set1(0.044715f), x);
  return div(x, add(set1(1.0f), exp_(mul(inner, set1(-1.59576912160573071f)))));
}

// Of one number. Without `default`, so that a kind that is forgotten here is an error of the compiler (-Werror=switch).
inline vf activation(ActKind kind, vf x) {
  switch (kind) {
    case ActKind::Silu: return div(x, add(set1(1.0f), exp_(sub(zero(), x))));
    case ActKind::Gelu: return gelu(x);
    case ActKind::GeluTanh: return gelu_tanh(x);
    case ActKind::Sigmoid: return sigmoid(x);
    case ActKind::Relu: return select(unordered(x), x, max_(x, zero()));
    case ActKind::Relu2: {
      const vf r = select(unordered(x), x, max_(x, zero()));
      return mul(r, r);
    }
    case ActKind::SwigluOai:
    case ActKind::SwigluClamped: break;  // of two numbers: see activate16; bind/args.h refuses them without a gate
  }
  __builtin_trap();
}

// NaN stays NaN.
inline vf clamped_above(vf x, float limit) {
  const vf hi = set1(limit);
  return select(less(hi, x), hi, x);
}

inline vf clamped(vf x, float limit) {
  const vf lo = set1(-limit);
  return clamped_above(select(less(x, lo), lo, x), limit);
}

// DeepSeek-V4: gate clamped from above, up from both sides.
inline vf swiglu_clamped(vf gate, vf up, float limit) {
  return mul(activation(ActKind::Silu, clamped_above(gate, limit)), clamped(up, limit));
}

// gpt_oss: the same clamps, another gate, and one more of up.
inline vf swiglu_oai(vf gate, vf up, float alpha, float limit) {
  const vf g = clamped_above(gate, limit), u = clamped(up, limit);
  const vf gated = div(g, add(set1(1.0f), exp_(sub(zero(), mul(set1(alpha), g)))));
  return mul(gated, add(u, set1(1.0f)));
}

}  // namespace
