// Scores by which an indexer chooses positions. Included by a tier file after attention.inl.
//
// What one row says of one position, whatever else is in the call:
//   for every head h: for every chunk of 128 dimensions: c = 0; for d ascending: c = fma(k[d], q[h][d], c); s = s + c
//   summed heads:  total = 0; for h ascending: total = fma(max(scale * s, 0), weight[h], total)
//   heads apart:   scale * s, for each of them
// 16 positions lie side by side in a vector, so that no sum runs over lanes.

namespace {

// Scales of keys that have none.
alignas(64) constexpr float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

template <int C>
void index_heads(const KeyStage& stage, const float* q, int dim, int first, int cols, int heads, float* dots, int i) {
  for (; i + C <= heads; i += C) {
    const float* x[C];
    for (int c = 0; c < C; ++c) x[c] = q + static_cast<int64_t>(i + c) * dim + first;
    key_kernel<C, 1>(stage.w, 0, x, cols, ones, first == 0, dots + i * 16, 0);
  }
  if constexpr (C > 1) index_heads<fewer(C)>(stage, q, dim, first, cols, heads, dots, i);
}

// Of positions [begin, end); writes up to the next multiple of 16, what it writes behind `end` means nothing.
void index_scores(const IndexArgs& a, int64_t row, int64_t begin, int64_t end, float* out, int64_t head_stride) {
  KeyStage stage;
  alignas(64) float dots[kMaxIndexHeads * 16];
  const int32_t* table = a.block_table + a.seq_ids[row] * a.table_stride;
  const float* q = a.q + row * a.num_heads * a.dim;
  for (int64_t from = begin; from < end; from += 16) {
    const uint8_t* keys[16];
    for (int64_t j = 0; j < 16; ++j) {
      const int64_t p = from + j < end ? from + j : end - 1;
      const int64_t slot = static_cast<int64_t>(table[p / a.page_size]) * a.page_size + p % a.page_size;
      keys[j] = reinterpret_cast<const uint8_t*>(a.k + slot * a.k_slot);
    }
    for (int first = 0; first < a.dim; first += kKeyCols) {
      const int cols = a.dim - first < kKeyCols ? a.dim - first : kKeyCols;
      stage_keys(KvType::F32, keys, first, cols, stage);
      index_heads<kQueryTokens>(stage, q, a.dim, first, cols, a.num_heads, dots, 0);
    }
    float* to = out + (from - begin);
    if (a.weights == nullptr) {
      for (int h = 0; h < a.num_heads; ++h) store(to + h * head_stride, mul(set1(a.scale), load(dots + h * 16)));
      continue;
    }
    const float* weights = a.weights + row * a.num_heads;
    vf total = zero();
    for (int h = 0; h < a.num_heads; ++h)
      total = fma_(max_(mul(set1(a.scale), load(dots + h * 16)), zero()), set1(weights[h]), total);
    store(to, total);
  }
}

}  // namespace
