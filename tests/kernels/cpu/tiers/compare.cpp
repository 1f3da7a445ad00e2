// Runs one instance of every family of kernels on the scalar tier and on each other tier of this machine, and compares
// all bits. A program of its own, so that tiers of another architecture run under an emulator, without Python.
// Prints a line for each tier and the digest of the scalar results, which is the same on every architecture.
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "runtime/format_info.h"
#include "runtime/grids.h"
#include "runtime/grouped.h"
#include "tiers/isa.h"

namespace {

using namespace kt;

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

constexpr int64_t kCols = 512;
constexpr int kTokens = 9;

uint32_t state;  // begins anew with every instance, so that tiers see the same numbers
uint32_t random_bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
float random_float() { return static_cast<float>(static_cast<int>(random_bits() % 20001) - 10000) / 4096.0f; }
Floats random_floats(int64_t n) {
  Floats out(static_cast<size_t>(n));
  for (float& x : out) x = random_float();
  return out;
}
Bytes random_bytes(int64_t n) {
  Bytes out(static_cast<size_t>(n));
  for (uint8_t& x : out) x = static_cast<uint8_t>(random_bits());
  return out;
}
uint16_t random_half() { return static_cast<uint16_t>((random_bits() & 0x83ffu) | (8 + random_bits() % 8) << 10); }
template <class T> void put_at(uint8_t* p, T value) { std::memcpy(p, &value, sizeof value); }
uint16_t upper_half(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return static_cast<uint16_t>(word >> 16);
}

template <class T> void put(Bytes& result, const std::vector<T>& values) {
  const auto* p = reinterpret_cast<const uint8_t*>(values.data());
  result.insert(result.end(), p, p + values.size() * sizeof(T));
}

void fill_grids() {
  const struct {
    QType type;
    size_t bytes;
    std::vector<uint8_t> values;
  } grids[] = {{QType::IQ2_XXS, 256 * 8, {8, 25, 43}},
               {QType::IQ2_XS, 512 * 8, {8, 25, 43}},
               {QType::IQ2_S, 1024 * 8, {8, 25, 43}},
               {QType::IQ1_S, 2048 * 8, {0, 8, 248}},
               {QType::IQ3_XXS, 256 * 4, {4, 12, 20, 28, 36, 44, 52, 62}},
               {QType::IQ3_S, 512 * 4, {1, 3, 5, 7, 9, 11, 13, 15}}};
  for (const auto& grid : grids) {
    Bytes values = random_bytes(static_cast<int64_t>(grid.bytes));
    for (uint8_t& value : values) value = grid.values[value % grid.values.size()];
    set_grid(static_cast<int>(grid.type), values.data(), values.size());
  }
}

// ---- products ----

// Makes the numbers of a block finite that are not codes.
void repair(const FormatInfo& info, uint8_t* p) {
  if (is_grouped(info.type)) {
    const GroupForm form(info.type);
    if (form.codes == CodeKind::F8)
      for (int i = form.head_bytes(); i < info.bytes; ++i)
        if ((p[i] & 0x7f) == 0x7f) p[i] ^= 1;
    if (form.scales == ScaleKind::F16) put_at(p, random_half());
    if (form.scales == ScaleKind::BF16) put_at(p, upper_half(random_float()));
    if (form.scales == ScaleKind::F32 || form.scales == ScaleKind::E4M3) put_at(p, random_float());
    if (form.scales == ScaleKind::E8M0) p[0] = static_cast<uint8_t>(120 + p[0] % 16);
    if (form.scales == ScaleKind::E4M3) p[4] = p[4] & 0x77, p[5] = p[5] & 0x77;
    return;
  }
  for (const int at : {info.halves.first, info.halves.second})
    if (at >= 0) put_at(p + at, random_half());
  switch (info.type) {
    case QType::F32: return put_at(p, random_float());
    case QType::F16: return put_at(p, random_half());
    case QType::BF16: return put_at(p, upper_half(random_float()));
    case QType::MXFP4: p[0] = static_cast<uint8_t>(120 + p[0] % 16); return;
    case QType::IQ1_M: p[55] &= 0xbf; return;
    case QType::NVFP4:
      for (int i = 0; i < 4; ++i) p[i] &= 0x77;
      return;
    case QType::F8_E4M3:
      for (int i = 0; i < info.bytes; ++i)
        if ((p[i] & 0x7f) == 0x7f) p[i] ^= 1;
      return;
    default: return;
  }
}

struct Activations {
  Floats x = random_floats(kTokens * kCols), d = Floats(kTokens * kCols / 32);
  std::vector<int8_t> q = std::vector<int8_t>(kTokens * kCols);
  std::vector<int16_t> sums = std::vector<int16_t>(kTokens * kCols / 256 * kSumsPerSuper);
  ActRows rows;

  Activations(const KernelTable& kernels, ActForm form) {
    const int64_t blocks = kCols / (form == ActForm::Q32 ? 32 : 256),
                  per_block = form == ActForm::Q32 ? kSumsPerBlock : kSumsPerSuper;
    for (int i = 0; i < 256; ++i) x[static_cast<size_t>(kCols + i)] *= 0x1p-110f;  // a block that counts as zeros
    rows = {x.data(), kCols, q.data(), kCols, d.data(), blocks, sums.data(), blocks * per_block};
    if (form == ActForm::Float) return;
    for (int64_t t = 0; t < kTokens; ++t)
      kernels.quantize_row(form, x.data() + t * kCols, kCols, q.data() + t * kCols, d.data() + t * blocks,
                           sums.data() + t * blocks * per_block);
  }
};

int64_t packed_bytes(const FormatInfo& info) {
  if (is_grouped(info.type)) return GroupForm(info.type).tile_bytes(kCols);
  const int64_t head = info.head_cols == 0 ? 0 : (kCols + info.head_cols - 1) / info.head_cols * info.head_bytes;
  return (head + 63) / 64 * 64 + kCols / info.block * info.packed_bytes;
}

Bytes products(const KernelTable& kernels, const FormatInfo& info) {
  const int64_t row_bytes = info.row_head + kCols / info.block * info.bytes;
  Bytes weights = random_bytes(kTileRows * row_bytes), result;
  for (int64_t r = 0; r < kTileRows; ++r) {
    uint8_t* row = weights.data() + r * row_bytes;
    if (info.row_head == 2) put_at(row, random_half());
    if (info.row_head == 4) put_at(row, random_float());
    for (int64_t at = info.row_head; at < row_bytes; at += info.bytes) repair(info, row + at);
  }
  const Activations act(kernels, info.form);
  TileArgs args{};
  args.type = info.type;
  args.k = kCols;
  args.act = act.rows;
  for (int64_t r = 0; r < kTileRows; ++r) args.rows[r] = weights.data() + r * row_bytes;
  const bool is_fp8 = info.kernels == Kernels::Fp8,
             has_packed = is_grouped(info.type) || info.kernels != Kernels::Plain;
  Bytes packed(static_cast<size_t>(packed_bytes(info)));
  if (is_fp8)
    kernels.pack_fp8_tile(args.rows, random_floats(kCols / kFp8Block).data(), kCols, packed.data());
  else if (has_packed)
    kernels.pack_tile(info.type, args.rows, kCols, packed.data());
  put(result, packed);
  for (const int tokens : {1, 3, 6, kTokens}) {
    Floats first(kTokens * kTileRows), second = first;
    args.num_tokens = tokens;
    if (!is_fp8) {
      args.acc = first.data();
      args.packed = nullptr;
      kernels.tile(args);
      put(result, first);
    }
    if (!has_packed) continue;
    TileArgs two[2] = {args, args};
    two[0].packed = two[1].packed = packed.data();
    two[0].acc = first.data();
    two[1].acc = second.data();
    kernels.packed_tiles(two, 2);
    put(result, first);
    put(result, second);
  }
  if (!is_fp8) {
    Floats row(kCols);
    kernels.dequantize_row(info.type, args.rows[3], kCols, row.data());
    put(result, row);
  }
  return result;
}

Bytes quantized(const KernelTable& kernels, ActForm form) {
  const Activations act(kernels, form);
  Bytes result;
  put(result, act.q);
  put(result, act.d);
  for (int64_t t = 0; t < kTokens; ++t)  // pairs of sums: tiers with narrow sums have them
    for (int64_t b = 0; b < act.rows.ldd; ++b) {
      const int16_t* sums =
          act.rows.sums + t * act.rows.lds + b * (form == ActForm::Q32 ? kSumsPerBlock : kSumsPerSuper);
      put(result, std::vector<int16_t>(sums, sums + (form == ActForm::Q32 ? kSumsPerBlock : kPairSums)));
    }
  return result;
}

// ---- rows ----

Bytes rows(const KernelTable& kernels) {
  constexpr int64_t n = 83;
  const Floats x = random_floats(n), y = random_floats(n), wide = random_floats(2 * n);
  Floats out(n);
  Bytes result;
  const auto add = [&] { put(result, out); };
  kernels.rms_norm_row(x.data(), y.data(), n, 1e-6f, out.data()), add();
  kernels.softmax_row(x.data(), n, out.data()), add();
  out = x;
  kernels.rotate_row(out.data(), y.data(), wide.data(), n - 1), add();
  kernels.add_row(out.data(), y.data(), n), add();
  const float *several[3] = {x.data(), y.data(), wide.data()}, weights[3] = {0.25f, -3.0f, 1.7f};
  kernels.combine_row(several, weights, 3, n, out.data()), add();
  for (int kind = 0; kind < static_cast<int>(sizeof kActivationNames / sizeof *kActivationNames); ++kind) {
    const ActSpec spec = {static_cast<ActKind>(kind), 1.702f, 7.0f};
    kernels.activate(spec, x.data(), wide.data(), n, out.data()), add();
    if (!needs_gate(spec.kind)) kernels.activate(spec, nullptr, wide.data(), n, out.data()), add();
  }
  for (const bool gate_first : {false, true})
    kernels.gated_norm_row({1e-5f, gate_first, ActKind::Silu}, x.data(), y.data(), wide.data(), n, out.data()), add();
  Floats beta(n);
  kernels.delta_gates_row(x.data(), y.data(), wide.data(), wide.data() + n, n, out.data(), beta.data()), add();
  put(result, beta);
  return result;
}

// ---- attention ----

constexpr int kPositions = 150, kRows = 5, kHeads = 4, kKvHeads = 2, kDimK = 96, kDimV = 80, kPageSize = 16;

// Keys or values of all positions as a cache keeps them.
Bytes stored(const KernelTable& kernels, KvType type, int dim, Floats& scales) {
  const int64_t bytes = dim * kv_bytes(type);
  Bytes cache(static_cast<size_t>(kPositions + 10) * kKvHeads * static_cast<size_t>(bytes));
  scales.assign(static_cast<size_t>(kPositions + 10) * kKvHeads, 0.0f);
  for (size_t i = 0; i < scales.size(); ++i)
    kernels.store_kv(type, random_floats(dim).data(), dim, cache.data() + static_cast<int64_t>(i) * bytes, &scales[i]);
  return cache;
}

Bytes attention(const KernelTable& kernels, KvType type, bool bf16_products) {
  const Floats q = random_floats(kRows * kHeads * kDimK);
  Floats k_scales, v_scales;
  const Bytes k = stored(kernels, type, kDimK, k_scales), v = stored(kernels, type, kDimV, v_scales);
  const std::vector<int32_t> pages = {3, 1, 0, 2, 4, 5, 9, 7, 8, 6}, seqs(kRows, 0), lens = {146, 147, 148, 149, 150};
  AttentionArgs a{};
  a.q = q.data(), a.kv_type = type, a.k = k.data(), a.v = v.data();
  a.q_row = kHeads * kDimK, a.q_head = kDimK;
  a.k_slot = kKvHeads * kDimK, a.k_head = kDimK, a.v_slot = kKvHeads * kDimV, a.v_head = kDimV;
  a.k_scales = k_scales.data(), a.v_scales = v_scales.data();
  a.k_scale_slot = a.v_scale_slot = kKvHeads, a.k_scale_head = a.v_scale_head = 1, a.k_parts = 1;
  a.block_table = pages.data(), a.table_stride = a.max_pages = 10, a.num_seqs = 1, a.page_size = kPageSize;
  a.num_slots = kPositions + 10, a.seq_ids = seqs.data(), a.kv_lens = lens.data(), a.num_rows = kRows;
  a.num_heads = kHeads, a.num_kv_heads = kKvHeads, a.dim_k = kDimK, a.dim_v = kDimV;
  a.scale = 0.05f, a.softcap = bf16_products ? 0.0f : 30.0f, a.bf16_products = bf16_products;
  constexpr int queries = kRows * kHeads / kKvHeads;
  Bytes result;
  put(result, k), put(result, v), put(result, k_scales), put(result, v_scales);
  Floats maxima[2], sums[2], out[2];
  for (int half = 0; half < 2; ++half) {
    maxima[half].resize(queries), sums[half].resize(queries), out[half].resize(queries * kDimV);
    const AttentionSpan span = {0, kRows, 2, 2, 1, half * 64, half == 0 ? 64 : kPositions};
    (bf16_products ? kernels.attention_span_bf16 : kernels.attention_span)(a, span, maxima[half].data(),
                                                                           sums[half].data(), out[half].data());
    put(result, maxima[half]), put(result, sums[half]), put(result, out[half]);
  }
  const float sink = 0.3f;
  Floats row(kDimV);
  kernels.attention_merge(maxima[0].data(), sums[0].data(), out[0].data(), maxima[1][0], sums[1][0], out[1].data(),
                          kDimV);
  kernels.attention_finish(maxima[0][0], sums[0][0], out[0].data(), &sink, kDimV, row.data());
  put(result, row);
  return result;
}

Bytes indexer(const KernelTable& kernels) {
  constexpr int heads = 7, dim = 144;
  const Floats q = random_floats(heads * dim), weights = random_floats(heads),
               k = random_floats((kPositions + 10) * dim);
  const std::vector<int32_t> pages = {3, 1, 0, 2, 4, 5, 9, 7, 8, 6}, seqs = {0}, lens = {kPositions};
  IndexArgs a{};
  a.q = q.data(), a.weights = weights.data(), a.k = k.data(), a.k_slot = dim;
  a.block_table = pages.data(), a.table_stride = a.max_pages = 10, a.num_seqs = 1, a.page_size = kPageSize;
  a.num_slots = kPositions + 10, a.seq_ids = seqs.data(), a.kv_lens = lens.data(), a.num_rows = 1;
  a.num_heads = heads, a.dim = dim, a.scale = 0.1f;
  Floats out(160 * heads);
  Bytes result;
  for (const bool is_apart : {false, true}) {
    if (is_apart) a.weights = nullptr;
    kernels.index_scores(a, 0, 0, kPositions, out.data(), 160);
    for (int64_t h = 0; h < (is_apart ? heads : 1); ++h)
      put(result, Floats(out.begin() + 160 * h, out.begin() + 160 * h + kPositions));
  }
  return result;
}

// ---- recurrent layers ----

RecurrentTask task_of(int64_t count) {
  RecurrentTask task{};
  task.num_rows = kRows, task.count = count, task.head = 1;
  task.read_slot = 0, task.write_slot = 1;
  return task;
}
const std::vector<int32_t> kSaveSlots = {-1, -1, 2, -1, -1};

Bytes convolution(const KernelTable& kernels) {
  constexpr int64_t channels = 43;
  const Floats x = random_floats(kRows * channels), weight = random_floats(channels * 4),
               bias = random_floats(channels);
  Floats out(kRows * channels), states = random_floats(3 * 3 * channels), memory(4096);
  ConvArgs a{};
  a.x = x.data(), a.ldx = channels, a.weight = weight.data(), a.weight_channel = 4, a.weight_tap = 1;
  a.bias = bias.data(), a.out = out.data(), a.states = states.data(), a.channels = channels, a.width = 4;
  a.is_silu = true, a.save_slots = kSaveSlots.data();
  RecurrentTask task = task_of(channels);
  task.before = states.data();
  kernels.causal_conv(a, task, memory.data());
  Bytes result;
  put(result, out), put(result, states);
  return result;
}

Bytes scan(const KernelTable& kernels, bool is_delta, bool is_per_key) {
  constexpr int64_t heads = 2, dim_k = 48, dim_v = 40;
  const Floats q = random_floats(kRows * dim_k), k = random_floats(kRows * dim_k),
               v = random_floats(kRows * heads * dim_v), beta = random_floats(kRows * heads);
  Floats decay = random_floats(kRows * heads * dim_k), out(kRows * heads * dim_v),
         states = random_floats(3 * heads * dim_k * dim_v), memory(1 << 14);
  for (float& x : decay) x = x > 0 ? -x : x;
  ScanArgs a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.q_row = a.k_row = dim_k, a.v_row = heads * dim_v;
  a.decay = decay.data(), a.decay_row = heads * (is_per_key ? dim_k : 1), a.beta = beta.data(), a.beta_row = heads;
  a.out = out.data(), a.states = states.data(), a.key_heads = 1, a.heads = heads, a.dim_k = dim_k, a.dim_v = dim_v;
  a.is_per_key = is_per_key, a.has_norm = true, a.norm_eps = 1e-6f, a.scale = 0.2f, a.save_slots = kSaveSlots.data();
  (is_delta ? kernels.delta_scan : kernels.linear_scan)(a, task_of(dim_v), memory.data());
  Bytes result;
  put(result, out), put(result, states);
  return result;
}

Bytes selective(const KernelTable& kernels) {
  constexpr int64_t channels = 43, size = 16;
  const Floats x = random_floats(kRows * channels), a_rates = random_floats(channels * size),
               d = random_floats(channels), b = random_floats(kRows * size), c = random_floats(kRows * size);
  Floats dt = random_floats(kRows * channels), out(kRows * channels), states = random_floats(3 * channels * size),
         memory(1 << 14);
  SelectiveArgs a{};
  a.x = x.data(), a.dt = dt.data(), a.a = a_rates.data(), a.b = b.data(), a.c = c.data(), a.d = d.data();
  a.x_row = a.dt_row = channels, a.b_row = a.c_row = size, a.out = out.data(), a.states = states.data();
  a.channels = channels, a.size = size, a.save_slots = kSaveSlots.data();
  kernels.selective_scan(a, task_of(channels), memory.data());
  Bytes result;
  put(result, out), put(result, states);
  return result;
}

// ---- sampling, and what measures ----

Bytes sampling(const KernelTable& kernels) {
  constexpr int64_t n = 1003;
  const Floats x = random_floats(n);
  Floats maxima(4);
  std::vector<double> weights(n), sums(4);
  std::vector<int32_t> ids(n), counts = {kernels.block_maxima(x.data(), n, maxima.data())};
  float top = maxima[0];
  for (const float maximum : maxima) top = maximum > top ? maximum : top;
  const WeightSpec spec = {top, top - 3.0f, 1.8, 0x1p-30};
  kernels.token_weights(x.data(), n, spec, weights.data());
  kernels.weight_sums(x.data(), n, maxima.data(), spec, sums.data());
  counts.push_back(static_cast<int32_t>(kernels.tokens_from(x.data(), n, maxima.data(), top - 0.5f, ids.data())));
  Bytes result;
  put(result, maxima), put(result, weights), put(result, sums), put(result, ids), put(result, counts);
  return result;
}

Bytes probes(const KernelTable& kernels) {
  std::vector<int32_t> out(32);
  kernels.multiply_registers(3, out.data());  // how many products it makes is the tier's
  kernels.multiply_fp32(3, out.data());
  Bytes result;
  put(result, std::vector<uint64_t>{kernels.read_lines(random_bytes(1 << 14).data(), 1 << 14)});
  return result;
}

struct Instance {
  std::string name;
  std::function<Bytes(const KernelTable&)> run;
};

std::vector<Instance> instances() {
  std::vector<Instance> all = {
      {"rows", rows},
      {"indexer", indexer},
      {"convolution", convolution},
      {"selective scan", selective},
      {"sampling", sampling},
      {"probes", probes},
      {"activations in blocks of 32", [](const KernelTable& t) { return quantized(t, ActForm::Q32); }},
      {"activations in blocks of 256", [](const KernelTable& t) { return quantized(t, ActForm::Q256); }},
      {"delta scan", [](const KernelTable& t) { return scan(t, true, false); }},
      {"delta scan, decay of each key", [](const KernelTable& t) { return scan(t, true, true); }},
      {"linear scan", [](const KernelTable& t) { return scan(t, false, false); }},
      {"attention, products of bf16", [](const KernelTable& t) { return attention(t, KvType::BF16, true); }}};
  for (const KvType type : {KvType::F32, KvType::BF16, KvType::I8, KvType::F8})
    all.push_back({"attention " + std::to_string(static_cast<int>(type)),
                   [type](const KernelTable& t) { return attention(t, type, false); }});
  std::vector<FormatInfo> formats(kFormats, kFormats + kNumFormats);
  formats.insert(formats.end(), grouped_formats().begin(), grouped_formats().end());
  for (const FormatInfo& info : formats)
    all.push_back({std::string("products ") + info.name, [info](const KernelTable& t) { return products(t, info); }});
  return all;
}

}  // namespace

int main() {
  fill_grids();
  const std::vector<Instance> all = instances();
  bool is_equal = true;
  uint64_t digest = 0xcbf29ce484222325u;
  std::vector<Bytes> wanted;
  for (const KernelTable* tier : available_tiers()) {
    size_t bytes = 0, wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      state = static_cast<uint32_t>(i);
      Bytes result = all[i].run(*tier);
      bytes += result.size();
      if (wanted.size() == i) {
        for (const uint8_t byte : result) digest = (digest ^ byte) * 0x100000001b3u;
        wanted.push_back(std::move(result));
      } else if (result != wanted[i]) {
        std::printf("%s: %s differs from scalar\n", tier->name, all[i].name.c_str());
        ++wrong;
      }
    }
    std::printf("%s: %zu instances, %zu bytes, %zu wrong\n", tier->name, all.size(), bytes, wrong);
    is_equal = is_equal && wrong == 0;
  }
  std::printf("digest %016llx\n", static_cast<unsigned long long>(digest));
  return is_equal ? 0 : 1;
}
