// Short convolutions, scans and gated norms of recurrent layers. Included by a tier file after attention.inl.
//
// What one row adds to the state of its sequence, all in fp32, fma where it says so; sums run over k, n or w ascending
// (mathematics of the delta rule: Yang et al. 2024, "Gated Delta Networks"; Mamba: Gu and Dao 2023):
//   causal_conv     y = act(sum_w fma(weight[w], x[t - W + 1 + w]) beginning with the bias)
//   delta_scan      q' = (q * r(q)) * scale, k' = k * r(k), r(x) = 1 / sqrt(sum of x^2 in 16 lanes + eps) or 1
//                   a = exp(decay), of the head or of each k;  n[k] = k'[k] * a[k]
//                   m[v] = sum_k fma(n[k], S[k][v]);  d[v] = (v[v] - m[v]) * beta
//                   S[k][v] = fma(k'[k], d[v], a[k] * S[k][v]);  o[v] = sum_k fma(q'[k], S[k][v])
//   linear_scan     S[k][v] = fma(k[k], v[v], exp(decay) * S[k][v]);  o[v] = sum_k fma(q[k], S[k][v])
//   selective_scan  S[n] = fma(exp(dt * A[n]), S[n], (dt * x) * B[n]);  y = sum_n fma(S[n], C[n]), then fma(D, x, y)
// Lanes are columns v or channels, so how these are divided among tasks changes no result, nor does the number of rows
// in a call. Columns of a state are copied to memory of the thread, where all rows of the call find them in the
// first-level cache: in a slot they lie a power of two apart.

namespace {

constexpr int kScanCols = 16 * kScanVectors;  // columns of a state that are advanced at a time
constexpr int kSelectiveChannels = 64;

inline int64_t padded16(int64_t n) { return (n + 15) / 16 * 16; }

inline int clipped16(int64_t n) { return static_cast<int>(n < 0 ? 0 : n < 16 ? n : 16); }

// Columns 16 * c .. of a row of which `count` are there.
inline vf load_part(const float* p, int c, int64_t count) {
  return count >= 16 * c + 16 ? load(p + 16 * c) : load_n(p + 16 * c, clipped16(count - 16 * c));
}
inline void store_part(float* p, vf x, int c, int64_t count) {
  if (count >= 16 * c + 16)
    store(p + 16 * c, x);
  else if (count > 16 * c)
    store_n(p + 16 * c, x, static_cast<int>(count - 16 * c));
}

// ---- causal_conv ----

// weight: [W], `stride` apart, of 16 channels side by side.
template <int W>
void conv_row(const ConvArgs& a, const float* weight, int64_t stride, const float* const* rows, int64_t first,
              int64_t count, float* out) {
  for (int64_t c = 0; c < count; c += 16) {
    const int n = clipped16(count - c);
    vf sum = a.bias != nullptr ? load_n(a.bias + first + c, n) : zero();
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum = fma_(load_n(weight + w * stride + c, n), load_n(rows[w] + c, n), sum);
    store_n(out + c, a.is_silu ? activation(ActKind::Silu, sum) : sum, n);
  }
}

template <int W> void conv_rows(const ConvArgs& a, const RecurrentTask& task, float* memory) {
  const int64_t stride = padded16(task.count), slot_size = (W - 1) * a.channels;
  float *side_by_side = memory, *history = memory + W * stride;
  const bool is_copied = a.weight_channel != 1;
  for (int64_t c = 0; is_copied && c < task.count; ++c)
    for (int w = 0; w < W; ++w)
      side_by_side[w * stride + c] = a.weight[(task.first + c) * a.weight_channel + w * a.weight_tap];
  const float* weight = is_copied ? side_by_side : a.weight + task.first;
  const size_t bytes = static_cast<size_t>(task.count) * sizeof(float);
  const float* rows[W] = {};
  for (int w = 0; w + 1 < W; ++w) {
    const int64_t row = task.first_row + w - (W - 1), behind = row - task.seq_row;
    if (behind >= 0) {
      rows[w] = a.x + row * a.ldx + task.first;
      continue;
    }
    rows[w] = history + w * stride;
    if (task.before == nullptr)
      std::memset(history + w * stride, 0, bytes);
    else
      std::memcpy(history + w * stride, task.before + (behind + W - 1) * a.channels + task.first, bytes);
  }
  const auto keep = [&](int64_t slot) {  // the inputs that the next row will want, oldest first
    for (int w = 0; slot >= 0 && w + 1 < W; ++w)
      std::memcpy(a.states + slot * slot_size + w * a.channels + task.first, rows[w + 1], bytes);
  };
  for (int64_t t = task.first_row; t < task.first_row + task.num_rows; ++t) {
    if (t > task.first_row)
      for (int w = 0; w + 1 < W; ++w) rows[w] = rows[w + 1];
    rows[W - 1] = a.x + t * a.ldx + task.first;
    conv_row<W>(a, weight, is_copied ? stride : a.weight_tap, rows, task.first, task.count,
                a.out + t * a.channels + task.first);
    keep(a.save_slots[t]);
  }
  keep(task.write_slot);
}

// memory: 2 * width * padded count floats.
void causal_conv(const ConvArgs& a, const RecurrentTask& task, float* memory) {
  switch (a.width) {
    case 1: return conv_rows<1>(a, task, memory);
    case 2: return conv_rows<2>(a, task, memory);
    case 3: return conv_rows<3>(a, task, memory);
    case 4: return conv_rows<4>(a, task, memory);
    case 5: return conv_rows<5>(a, task, memory);
    case 6: return conv_rows<6>(a, task, memory);
    case 7: return conv_rows<7>(a, task, memory);
    default: return conv_rows<8>(a, task, memory);
  }
}

// ---- scans over heads ----

// Columns first .. first + count - 1 of a head's state, [K][kScanCols], zeros behind them. end: of the task's rows.
struct StateColumns {
  float* s;
  int64_t first, count;
  int64_t end;
  bool is_first;  // of the columns of the task
};

inline void prefetch(const float* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(p + i);
}

// What the row kScanRows behind this one reads and writes. Rows lie pages apart, which no processor foresees.
inline void prefetch_ahead(const ScanArgs& a, int head, int64_t row, const StateColumns& state) {
  const int64_t t = row + kScanRows;
  if (t >= state.end) return;
  prefetch(a.v + t * a.v_row + head * a.dim_v + state.first, state.count);
  prefetch(a.out + (t * a.heads + head) * a.dim_v + state.first, state.count);
  if (!state.is_first) return;
  const int64_t key_head = head / (a.heads / a.key_heads);
  prefetch(a.q + t * a.q_row + key_head * a.dim_k, a.dim_k);
  prefetch(a.k + t * a.k_row + key_head * a.dim_k, a.dim_k);
  if (a.is_per_key) prefetch(a.decay + t * a.decay_row + head * a.dim_k, a.dim_k);
}

inline float* columns_in(const ScanArgs& a, int64_t slot, int head, int64_t first) {
  return a.states + ((slot * a.heads + head) * a.dim_k) * a.dim_v + first;
}

void read_columns(const ScanArgs& a, const RecurrentTask& task, const StateColumns& state) {
  if (task.read_slot < 0) {
    std::memset(state.s, 0, static_cast<size_t>(a.dim_k * kScanCols) * sizeof(float));
    return;
  }
  const float* from = columns_in(a, task.read_slot, task.head, state.first);
  for (int64_t k = 0; k < a.dim_k; ++k)
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c)
      store(state.s + k * kScanCols + 16 * c, load_part(from + k * a.dim_v, c, state.count));
}

void write_columns(const ScanArgs& a, int64_t slot, int head, const StateColumns& state) {
  if (slot < 0) return;
  float* to = columns_in(a, slot, head, state.first);
  for (int64_t k = 0; k < a.dim_k; ++k)
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c)
      store_part(to + k * a.dim_v, load(state.s + k * kScanCols + 16 * c), c, state.count);
}

// Keys and queries of kScanRows rows of one head, [row][padded K], made ready once for all columns.
struct ReadyRows {
  float *query, *key, *recall, *decay;  // recall: n above; decay: a of each k, if they differ
  float head_decay[kScanRows], beta[kScanRows];
  int64_t stride;
};

inline ReadyRows ready_rows(const ScanArgs& a, float* memory) {
  ReadyRows r;
  r.stride = padded16(a.dim_k);
  r.query = memory;
  r.key = r.query + kScanRows * r.stride;
  r.recall = r.key + kScanRows * r.stride;
  r.decay = r.recall + kScanRows * r.stride;
  return r;
}

// out = (x * r(x)) * scale.
void normalize(const ScanArgs& a, const float* x, float scale, float* out) {
  float inverse = 1.0f;
  if (a.has_norm) {
    vf squares = zero();
    for (int64_t i = 0; i < a.dim_k; i += 16) {
      const vf v = load_n(x + i, clipped16(a.dim_k - i));
      squares = fma_(v, v, squares);
    }
    inverse = 1.0f / __builtin_sqrtf(reduce_add(squares) + a.norm_eps);
  }
  for (int64_t i = 0; i < a.dim_k; i += 16)
    store(out + i, mul(mul(load_n(x + i, clipped16(a.dim_k - i)), set1(inverse)), set1(scale)));
}

void make_ready(const ScanArgs& a, int head, int64_t row, int count, ReadyRows& r) {
  const int64_t key_head = head / (a.heads / a.key_heads);
  for (int i = 0; i < count; ++i) {
    const int64_t t = row + i, at = i * r.stride;
    normalize(a, a.q + t * a.q_row + key_head * a.dim_k, a.scale, r.query + at);
    normalize(a, a.k + t * a.k_row + key_head * a.dim_k, 1.0f, r.key + at);
    r.beta[i] = a.beta[t * a.beta_row + head];
    const float* decay = a.decay + t * a.decay_row + head * (a.is_per_key ? a.dim_k : 1);
    r.head_decay[i] = a.is_per_key ? 0.0f : exp1(*decay);
    for (int64_t k = 0; k < a.dim_k; k += 16) {
      const vf factor = a.is_per_key ? exp_(load_n(decay + k, clipped16(a.dim_k - k))) : set1(r.head_decay[i]);
      if (a.is_per_key) store(r.decay + at + k, factor);
      store(r.recall + at + k, mul(load(r.key + at + k), factor));
    }
  }
}

struct Columns { vf c[kScanVectors]; };

inline Columns no_columns() {
  Columns x;
  for (vf& c : x.c) c = zero();
  return x;
}

// m of a row, for the first row of a run; advance computes that of the next ones on its way.
inline Columns recall(const float* s, const float* n, int64_t dim_k) {
  Columns sum = no_columns();
  for (int64_t k = 0; k < dim_k; ++k) {
    const vf factor = set1(n[k]);
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c) sum.c[c] = fma_(factor, load(s + k * kScanCols + 16 * c), sum.c[c]);
  }
  return sum;
}

// One row: the state by d, its o, and the m of the next row.
template <bool kPerKey, bool kHasNext>
inline void advance(const ReadyRows& r, int i, int64_t dim_k, const Columns& d, float* s, Columns* o, Columns* m) {
  const float *key = r.key + i * r.stride, *query = r.query + i * r.stride;
  const float *next = r.recall + (i + 1) * r.stride, *decay = r.decay + i * r.stride;
  const vf head_decay = set1(r.head_decay[i]);
  Columns out = no_columns(), memory = no_columns();
  for (int64_t k = 0; k < dim_k; ++k) {
    const vf kk = set1(key[k]), qq = set1(query[k]), a = kPerKey ? set1(decay[k]) : head_decay;
    const vf nn = kHasNext ? set1(next[k]) : kk;
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c) {
      float* at = s + k * kScanCols + 16 * c;
      const vf x = fma_(kk, d.c[c], mul(a, load(at)));
      store(at, x);
      out.c[c] = fma_(qq, x, out.c[c]);
      if constexpr (kHasNext) memory.c[c] = fma_(nn, x, memory.c[c]);
    }
  }
  *o = out;
  *m = memory;
}

template <bool kPerKey>
void delta_rows(const ScanArgs& a, int head, int64_t row, int count, const ReadyRows& r, const StateColumns& state) {
  Columns m = recall(state.s, r.recall, a.dim_k);
  for (int i = 0; i < count; ++i) {
    const int64_t t = row + i;
    const float* v = a.v + t * a.v_row + head * a.dim_v + state.first;
    prefetch_ahead(a, head, t, state);
    float* out = a.out + (t * a.heads + head) * a.dim_v + state.first;
    Columns d, o;
    for (int c = 0; c < kScanVectors; ++c) d.c[c] = mul(sub(load_part(v, c, state.count), m.c[c]), set1(r.beta[i]));
    if (i + 1 < count)
      advance<kPerKey, true>(r, i, a.dim_k, d, state.s, &o, &m);
    else
      advance<kPerKey, false>(r, i, a.dim_k, d, state.s, &o, &m);
    for (int c = 0; c < kScanVectors; ++c) store_part(out, o.c[c], c, state.count);
    write_columns(a, a.save_slots[t], head, state);
  }
}

// `rows` rows are computed by compute(row, count, state), kScanRows at a time after ready(row, count), for all columns
// of the task. Columns whose rows are all computed in one go share the memory of their states.
template <class Ready, class Compute>
void scan_columns(const ScanArgs& a, const RecurrentTask& task, float* states, const Ready& ready,
                  const Compute& compute) {
  const int64_t end = task.first_row + task.num_rows, size = a.dim_k * kScanCols;
  for (int64_t row = task.first_row; row < end; row += kScanRows) {
    const int count = static_cast<int>(end - row < kScanRows ? end - row : kScanRows);
    ready(row, count);
    for (int64_t first = 0; first < task.count; first += kScanCols) {
      const int64_t left = task.count - first;
      const StateColumns state = {task.num_rows <= kScanRows ? states : states + first / kScanCols * size,
                                  task.first + first, left < kScanCols ? left : kScanCols, end, first == 0};
      if (row == task.first_row) read_columns(a, task, state);
      compute(row, count, state);
      if (row + count == end) write_columns(a, task.write_slot, task.head, state);
    }
  }
}

// memory: scan_memory of ops/recurrent/recurrent.cpp.
void delta_scan(const ScanArgs& a, const RecurrentTask& task, float* memory) {
  ReadyRows r = ready_rows(a, memory);
  scan_columns(
      a, task, r.decay + kScanRows * r.stride, [&](int64_t row, int count) { make_ready(a, task.head, row, count, r); },
      [&](int64_t row, int count, const StateColumns& state) {
        if (a.is_per_key)
          delta_rows<true>(a, task.head, row, count, r, state);
        else
          delta_rows<false>(a, task.head, row, count, r, state);
      });
}

// N rows at once: nothing that a row adds depends on the state.
template <int N>
void linear_rows(const ScanArgs& a, int head, int64_t row, const float* decays, const StateColumns& state) {
  const int64_t key_head = head / (a.heads / a.key_heads);
  const float *q[N], *k[N];
  vf decay[N];
  Columns v[N], o[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const int64_t t = row + i;
    prefetch_ahead(a, head, t, state);
    q[i] = a.q + t * a.q_row + key_head * a.dim_k;
    k[i] = a.k + t * a.k_row + key_head * a.dim_k;
    decay[i] = set1(decays[i]);
    o[i] = no_columns();
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c)
      v[i].c[c] = load_part(a.v + t * a.v_row + head * a.dim_v + state.first, c, state.count);
  }
  for (int64_t j = 0; j < a.dim_k; ++j)
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c) {
      float* at = state.s + j * kScanCols + 16 * c;
      vf x = load(at);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        x = fma_(set1(k[i][j]), v[i].c[c], mul(decay[i], x));
        o[i].c[c] = fma_(set1(q[i][j]), x, o[i].c[c]);
      }
      store(at, x);
    }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
    for (int c = 0; c < kScanVectors; ++c)
      store_part(a.out + ((row + i) * a.heads + head) * a.dim_v + state.first, o[i].c[c], c, state.count);
}

void linear_scan(const ScanArgs& a, const RecurrentTask& task, float* memory) {
  alignas(64) float decays[16] = {};
  static_assert(kScanRows <= 16, "their decays are one vector");
  scan_columns(
      a, task, memory,
      [&](int64_t row, int count) {
        for (int i = 0; i < count; ++i) decays[i] = a.decay[(row + i) * a.decay_row + task.head];
        store(decays, exp_(load(decays)));
      },
      [&](int64_t row, int count, const StateColumns& state) {
        for (int i = 0; i < count;) {
          bool is_saved = i + kScanTokens > count;  // ends a group early
          for (int j = 0; !is_saved && j + 1 < kScanTokens; ++j) is_saved = a.save_slots[row + i + j] >= 0;
          if (is_saved)
            linear_rows<1>(a, task.head, row + i, decays + i, state);
          else
            linear_rows<kScanTokens>(a, task.head, row + i, decays + i, state);
          i += is_saved ? 1 : kScanTokens;
          write_columns(a, a.save_slots[row + i - 1], task.head, state);
        }
      });
}

// ---- selective_scan ----

// [count channels][size] to [size][16] and back; lanes without a channel are zeros.
void channels_to_lanes(const float* from, int count, int64_t size, float* to) {
  if (count == 16 && size % 16 == 0) {
    const uint8_t* rows[16];
    for (int c = 0; c < 16; ++c) rows[c] = reinterpret_cast<const uint8_t*>(from + c * size);
    for (int64_t n = 0; n < size; n += 16) store_columns16(rows, n * 4, to + n * 16);
    return;
  }
  for (int64_t n = 0; n < size; ++n)
    for (int c = 0; c < 16; ++c) to[n * 16 + c] = c < count ? from[c * size + n] : 0.0f;
}
void lanes_to_channels(const float* from, int count, int64_t size, float* to) {
  if (count == 16 && size == 16) return channels_to_lanes(from, 16, 16, to);
  for (int c = 0; c < count; ++c)
    for (int64_t n = 0; n < size; ++n) to[c * size + n] = from[n * 16 + c];
}

// 16 channels of one row; rates, s: [size][16].
inline vf selective_row(const float* rates, const float* b, const float* c, int64_t size, vf x, vf dt, float* s) {
  const vf input = mul(dt, x);
  vf y = zero();
  for (int64_t n = 0; n < size; ++n) {
    const vf state = fma_(exp_(mul(dt, load(rates + n * 16))), load(s + n * 16), mul(input, set1(b[n])));
    store(s + n * 16, state);
    y = fma_(state, set1(c[n]), y);
  }
  return y;
}

// task.count: up to kSelectiveChannels. memory: 2 * kSelectiveChannels * size floats.
void selective_scan(const SelectiveArgs& a, const RecurrentTask& task, float* memory) {
  float *rates = memory, *states = memory + kSelectiveChannels * a.size;
  const int64_t slot_size = a.channels * a.size;
  for (int64_t c = 0; c < task.count; c += 16) {
    const int n = clipped16(task.count - c);
    channels_to_lanes(a.a + (task.first + c) * a.size, n, a.size, rates + c * a.size);
    if (task.read_slot < 0)
      std::memset(states + c * a.size, 0, static_cast<size_t>(16 * a.size) * sizeof(float));
    else
      channels_to_lanes(a.states + task.read_slot * slot_size + (task.first + c) * a.size, n, a.size,
                        states + c * a.size);
  }
  const auto keep = [&](int64_t slot) {
    for (int64_t c = 0; slot >= 0 && c < task.count; c += 16)
      lanes_to_channels(states + c * a.size, clipped16(task.count - c), a.size,
                        a.states + slot * slot_size + (task.first + c) * a.size);
  };
  for (int64_t t = task.first_row; t < task.first_row + task.num_rows; ++t) {
    for (int64_t c = 0; c < task.count; c += 16) {
      const int n = clipped16(task.count - c);
      const int64_t at = task.first + c;
      const vf x = load_n(a.x + t * a.x_row + at, n), dt = load_n(a.dt + t * a.dt_row + at, n);
      vf y =
          selective_row(rates + c * a.size, a.b + t * a.b_row, a.c + t * a.c_row, a.size, x, dt, states + c * a.size);
      if (a.d != nullptr) y = fma_(load_n(a.d + at, n), x, y);
      store_n(a.out + t * a.channels + at, y, n);
    }
    keep(a.save_slots[t]);
  }
  keep(task.write_slot);
}

// ---- around the scans ----

// out = (weight * (x * r)) * act(gate), or weight * (u * r) with u = x * act(gate) if the gate comes first;
// r = 1 / sqrt(mean of squares + eps), summed as in rms_norm_row. out may be x.
void gated_norm_row(const GatedNormSpec& spec, const float* x, const float* gate, const float* weight, int64_t n,
                    float* out) {
  vf squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int count = clipped16(n - i);
    vf v = load_n(x + i, count);
    if (spec.gate_first) {
      v = mul(v, activation(spec.act, load_n(gate + i, count)));
      store_n(out + i, v, count);
    }
    squares = fma_(v, v, squares);
  }
  if (spec.gate_first) x = out;
  const vf scale = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + spec.eps));
  for (int64_t i = 0; i < n; i += 16) {
    const int count = clipped16(n - i);
    vf v = mul(load_n(weight + i, count), mul(load_n(x + i, count), scale));
    if (!spec.gate_first) v = mul(v, activation(spec.act, load_n(gate + i, count)));
    store_n(out + i, v, count);
  }
}

// decay[h] = rate[h] * softplus(a[h] + bias[h]), beta[h] = sigmoid(b[h]).
void delta_gates_row(const float* a, const float* b, const float* rate, const float* bias, int64_t n, float* decay,
                     float* beta) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = clipped16(n - i);
    const vf step = softplus(add(load_n(a + i, count), load_n(bias + i, count)));
    store_n(decay + i, mul(load_n(rate + i, count), step), count);
    store_n(beta + i, sigmoid(load_n(b + i, count)), count);
  }
}

}  // namespace
