// Row-wise kernels: RMS norm, activations, the weighted sum of expert outputs.
// Included by a tier file after math.inl.

namespace {

// out = weight * (x * (1 / sqrt(mean(x^2) + eps))); squares are summed in 16 lanes, then by reduce_add's tree.
void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
  vf squares = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const vf v = load(x + i);
    squares = fma_(v, v, squares);
  }
  const int rest = static_cast<int>(n - i);
  if (rest > 0) {
    const vf v = load_n(x + i, rest);
    squares = fma_(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(n);
  const vf scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(load(weight + i), mul(load(x + i), scale)));
  if (rest > 0) store_n(out + i, mul(load_n(weight + i, rest), mul(load_n(x + i, rest), scale)), rest);
}

// out = exp(x - max) / sum; the sum is taken in 16 lanes, then by reduce_add's tree.
void softmax_row(const float* x, int64_t n, float* out) {
  float max = -__builtin_inff();
  for (int64_t i = 0; i < n; ++i) max = x[i] > max ? x[i] : max;
  vf sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int count = static_cast<int>(n - i < 16 ? n - i : 16);
    const vf e = exp_(sub(load_n(x + i, count), set1(max)));
    store_n(out + i, e, count);
    sum = add(sum, load_n(out + i, count));
  }
  const vf total = set1(reduce_add(sum));
  for (int64_t i = 0; i < n; i += 16) {
    const int count = static_cast<int>(n - i < 16 ? n - i : 16);
    store_n(out + i, div(load_n(out + i, count), total), count);
  }
}

// Rotates halves of one head in place (Su et al. 2021, in the order of Hugging Face): with x = (a, b),
// a' = a cos - b sin, b' = b cos + a sin, every product rounded. cos and sin have `dims` entries.
void rotate_row(float* x, const float* cos, const float* sin, int64_t dims) {
  const int64_t half = dims / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int n = static_cast<int>(half - i < 16 ? half - i : 16);
    const vf a = load_n(x + i, n), b = load_n(x + half + i, n);
    store_n(x + i, sub(mul(a, load_n(cos + i, n)), mul(b, load_n(sin + i, n))), n);
    store_n(x + half + i, add(mul(b, load_n(cos + half + i, n)), mul(a, load_n(sin + half + i, n))), n);
  }
}

void add_row(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = static_cast<int>(n - i < 16 ? n - i : 16);
    store_n(x + i, add(load_n(x + i, count), load_n(y + i, count)), count);
  }
}

inline vf activate16(const ActSpec& spec, bool has_gate, vf gate, vf up) {
  if (!has_gate) return activation(spec.kind, up);
  if (spec.kind == ActKind::SwigluOai) return swiglu_oai(gate, up, spec.alpha, spec.limit);
  if (spec.kind == ActKind::SwigluClamped) return swiglu_clamped(gate, up, spec.limit);
  return mul(activation(spec.kind, gate), up);
}

// out = act(gate) * up, or act(up) when gate is null. out may be gate or up.
void activate(const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out) {
  const bool has_gate = gate != nullptr;
  if (!has_gate) gate = up;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, activate16(spec, has_gate, load(gate + i), load(up + i)));
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store_n(out + i, activate16(spec, has_gate, load_n(gate + i, rest), load_n(up + i, rest)), rest);
}

// out = ((w0 * rows0) + w1 * rows1) + ..., in the order given; zeros when count is 0.
void combine_row(const float* const* rows, const float* weights, int count, int64_t n, float* out) {
  int64_t i = 0;
  for (; i < n; i += 16) {
    const int rest = static_cast<int>(n - i < 16 ? n - i : 16);
    vf sum = count > 0 ? mul(set1(weights[0]), load_n(rows[0] + i, rest)) : zero();
    for (int j = 1; j < count; ++j) sum = add(sum, mul(set1(weights[j]), load_n(rows[j] + i, rest)));
    store_n(out + i, sum, rest);
  }
}

}  // namespace
