// Plain types shared by every translation unit: argument structs, a tier's table of kernels.
// No code lives here: this header is included by files that are compiled for different instruction sets, and an
// inline function compiled with AVX-512 must never be the copy that the linker keeps for the others.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "runtime/formats.h"
#include "runtime/grids.h"
#include "runtime/named_enum.h"
#include "runtime/recurrent.h"

namespace kt {

// Activations of an MLP. A new kind also needs a case in common/math.inl and a member of Python's Activation.
#define KT_ACTIVATIONS(KIND)    \
  KIND(Silu, "SILU")            \
  KIND(Gelu, "GELU")            \
  KIND(GeluTanh, "GELU_TANH")   \
  KIND(Relu, "RELU")            \
  KIND(Relu2, "RELU2")          \
  KIND(Sigmoid, "SIGMOID")      \
  KIND(SwigluOai, "SWIGLU_OAI") \
  KIND(SwigluClamped, "SWIGLU_CLAMPED")
KT_NAMED_ENUM(ActKind, kActivationNames, KT_ACTIVATIONS);

// Whether an activation is one of a gate and what it multiplies, and there is none of a single number.
constexpr bool needs_gate(ActKind kind) { return kind == ActKind::SwigluOai || kind == ActKind::SwigluClamped; }

constexpr int kTileRows = 16;    // outputs that one tile computes side by side, one per lane
constexpr int kTileCols = 256;   // columns of weights that are staged at a time
constexpr int kFloatCols = 512;  // the same for unquantized weights, 8 rows at a time
constexpr int kBf16Cols = 32;    // columns of a tile of bf16
constexpr int kPairSums = 24;    // 16 + 8 sums come before the pairs, see ActForm::Q256
constexpr int kSumsPerSuper = kPairSums + 32;
constexpr int kSumsPerBlock = 2;  // of 32 values

// Rows of activations in every form that the weights of one call need; strides in elements.
struct ActRows {
  const float* x = nullptr;
  int64_t ldx = 0;
  const int8_t* q = nullptr;
  int64_t ldq = 0;
  const float* d = nullptr;
  int64_t ldd = 0;
  const int16_t* sums = nullptr;
  int64_t lds = 0;
};

// The activations of some tokens, 256 columns at a time (8 blocks of 32 or one of 256), each piece contiguous: what
// kernels over tile registers read. Pieces have `rows` rows, of which those behind the last token are not set.
struct TokenBlocks {
  int8_t* q = nullptr;      // [pieces][rows][256]
  int16_t* sums = nullptr;  // [pieces][rows][8], of 32 columns each
  float* d = nullptr;       // [pieces][rows][8]; of a block of 256: the first
  int64_t rows = 0;
  int16_t* sums16 = nullptr;  // [pieces][rows][16], of 16 columns each; of blocks of 256 only
  uint16_t* bf16 = nullptr;   // [columns / 32][rows][32], rounded to bf16, instead of the others: what bf16_tiles reads
};

// One tile of 16 weight rows times `num_tokens` activation rows.
struct TileArgs {
  QType type;
  const uint8_t* rows[kTileRows];  // one pointer per lane; lanes past the last row repeat a valid one
  int64_t k;                       // columns
  ActRows act;
  const int32_t* token_ids;  // row of `act` of each token, or nullptr: first_token, first_token + 1, ...
  int64_t first_token;
  int num_tokens;
  float* acc;                           // [num_tokens][16], written
  const uint8_t* packed = nullptr;      // the packed tile (packed.inl), or nullptr: `rows`
  const TokenBlocks* blocks = nullptr;  // the same tokens once more, or nullptr
};

struct ActSpec {
  ActKind kind;
  float alpha;  // SwigluOai only
  float limit;  // SwigluOai and SwigluClamped only
};

// RMSNorm of groups, times the activation of a gate, before the norm or behind it.
struct GatedNormSpec {
  float eps;
  bool gate_first;
  ActKind act;
};

// What keys and values are kept in. I8 and F8 (e4m3) are codes that a scale is multiplied with, see
// kernels/attention/kv.inl.
enum class KvType : int32_t { F32 = 0, BF16 = 1, I8 = 2, F8 = 3 };

constexpr int64_t kv_bytes(KvType type) { return type == KvType::F32 ? 4 : type == KvType::BF16 ? 2 : 1; }
constexpr bool has_scales(KvType type) { return kv_bytes(type) == 1; }

struct AttentionArgs {
  const float* q;  // [T, Hq, Dk]
  KvType kv_type;
  const uint8_t* k;
  const uint8_t* v;
  float* out;             // [T, Hq, Dv]
  int64_t q_row, q_head;  // strides in elements
  int64_t k_slot, k_head, v_slot, v_head;
  const float *k_scales, *v_scales;  // [slots, heads, parts], of codes; their strides
  int64_t k_scale_slot, k_scale_head, v_scale_slot, v_scale_head;
  int k_parts;  // scales of a key: 2 where the first dim_v dimensions have one and the others another
  const int32_t* block_table;
  int64_t table_stride;
  int64_t num_seqs, max_pages;  // size of block_table
  int64_t page_size;
  int64_t num_slots;       // of the cache: every slot used is below
  const int32_t* seq_ids;  // [T]
  const int32_t* kv_lens;  // [T]
  int64_t num_rows;
  int num_heads, num_kv_heads, dim_k, dim_v;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // positions that a row sees, itself included; 0: all
  bool is_chunked;       // positions come in chunks of `window`, and a row sees those of its own chunk
  const float* sinks;    // [Hq] or nullptr
  bool bf16_products;    // of keys and values in bf16, see attention/bf16.inl

  // The first position that a row of `len` positions sees.
  int64_t oldest(int64_t len) const {
    if (window <= 0 || len <= window) return 0;
    return is_chunked ? (len - 1) / window * window : len - window;
  }
};

// Queries of neighbouring rows of one sequence and neighbouring heads of one KV head, over positions [begin, end).
struct AttentionSpan {
  int64_t first_row;
  int num_rows;
  int first_head, num_heads;  // query heads
  int kv_head;
  int64_t begin, end;  // absolute positions
};

constexpr int kMaxQueries = 384;     // rows times heads of a span
constexpr int kPositionTile = 64;    // positions between two updates of the running maximum
constexpr int kPositionSplit = 512;  // positions of one span; spans are merged in ascending order

constexpr int kMaxBf16Dims = 512;  // of a key, with products of bf16

constexpr int kMaxIndexHeads = 128;

// What an indexer scores the cached positions of its rows with. weights: [T, H], heads are summed; nullptr: apart.
struct IndexArgs {
  const float* q;  // [T, H, D], contiguous
  const float* weights;
  const float* k;  // [slots, D]
  int64_t k_slot;  // stride in elements
  const int32_t* block_table;
  int64_t table_stride;
  int64_t num_seqs, max_pages;
  int64_t page_size;
  int64_t num_slots;
  const int32_t* seq_ids;  // [T]
  const int32_t* kv_lens;  // [T]
  int64_t num_rows;
  int num_heads, dim;
  float scale;
};

constexpr int kSampleBlock = 256;  // tokens whose greatest logit, and whose sum of weights, stand for them

// The weight of a token: 2^((logit - top) * scale), 0 where that is below `floor` or the logit below `least`.
struct WeightSpec {
  float top;     // the greatest logit, finite
  float least;   // from here on the exponent is at least -66
  double scale;  // log2(e) / temperature, finite
  double floor;  // at least 2^-64
};

// The kernels of one instruction-set tier. Every entry is single-threaded and keeps no state.
struct KernelTable {
  const char* name;
  int min_block_tokens;  // from here on packed_tiles is faster when it is given `blocks`; 0: never
  void (*quantize_row)(ActForm form, const float* x, int64_t k, int8_t* q, float* d, int16_t* sums);
  void (*tile)(const TileArgs& args);  // args.rows
  // `count` tiles of packed weights, args[i].packed, which share k, tokens and activations; types of one ActForm.
  void (*packed_tiles)(const TileArgs* args, int count);
  void (*pack_tile)(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out);
  // 16 rows of FP8 codes; scales: one per 128 columns.
  void (*pack_fp8_tile)(const uint8_t* const* rows, const float* scales, int64_t k, uint8_t* out);
  void (*dequantize_row)(QType type, const uint8_t* row, int64_t k, float* out);
  void (*rms_norm_row)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*softmax_row)(const float* x, int64_t n, float* out);
  void (*rotate_row)(float* x, const float* cos, const float* sin, int64_t dims);
  void (*add_row)(float* x, const float* y, int64_t n);
  void (*activate)(const ActSpec& spec, const float* gate, const float* up, int64_t n, float* out);
  void (*combine_row)(const float* const* rows, const float* weights, int count, int64_t n, float* out);
  // Writes maximum [nq], sum [nq] and the unnormalized output [nq][dim_v]; nq = num_rows * num_heads.
  void (*attention_span)(const AttentionArgs& args, const AttentionSpan& span, float* maxima, float* sums, float* out);
  // The same with products of bf16, of a cache of bf16.
  void (*attention_span_bf16)(const AttentionArgs& args, const AttentionSpan& span, float* maxima, float* sums,
                              float* out);
  void (*attention_merge)(float* max, float* sum, float* out, float max2, float sum2, const float* out2, int dim_v);
  void (*attention_finish)(float max, float sum, const float* acc, const float* sink, int dim_v, float* out);
  // n numbers of a head as the cache keeps them, see kv.inl. scale: of codes, one number.
  void (*store_kv)(KvType type, const float* x, int64_t n, uint8_t* out, float* scale);
  // See recurrent.inl. memory: of the thread, as much as ops/recurrent/recurrent.cpp says.
  void (*causal_conv)(const ConvArgs& args, const RecurrentTask& task, float* memory);
  void (*delta_scan)(const ScanArgs& args, const RecurrentTask& task, float* memory);
  void (*linear_scan)(const ScanArgs& args, const RecurrentTask& task, float* memory);
  void (*selective_scan)(const SelectiveArgs& args, const RecurrentTask& task, float* memory);
  void (*gated_norm_row)(const GatedNormSpec& spec, const float* x, const float* gate, const float* weight, int64_t n,
                         float* out);
  void (*delta_gates_row)(const float* a, const float* b, const float* rate, const float* bias, int64_t n, float* decay,
                          float* beta);
  int scan_cols;  // columns of a state that scans over heads keep at a time
  // Of positions [begin, end) of a row, see index.inl; heads that are apart lie head_stride apart.
  void (*index_scores)(const IndexArgs& args, int64_t row, int64_t begin, int64_t end, float* out, int64_t head_stride);
  // Of n logits, see sampling.inl.
  int32_t (*block_maxima)(const float* x, int64_t n, float* maxima);
  void (*token_weights)(const float* x, int64_t n, const WeightSpec& spec, double* out);
  void (*weight_sums)(const float* x, int64_t n, const float* maxima, const WeightSpec& spec, double* sums);
  int64_t (*tokens_from)(const float* x, int64_t n, const float* maxima, float least, int32_t* ids);
  uint64_t (*read_lines)(const uint8_t* p, int64_t bytes);
  int64_t (*multiply_registers)(int64_t rounds, int32_t* out);  // out: 32 numbers, zeros
  int64_t (*multiply_fp32)(int64_t rounds, int32_t* out);       // as multiply_registers
  // `count` tiles of packed weights of any types, which share k, tokens and blocks->bf16 (bf16.inl); nullptr: the tier
  // has no products of bf16.
  void (*bf16_tiles)(const TileArgs* args, int count) = nullptr;
  // out[i * ldo + j] = bf16(x[i * ldx + j]) for i < count, j < width.
  void (*round_bf16)(const float* x, int64_t ldx, int64_t count, int64_t width, uint16_t* out, int64_t ldo) = nullptr;
  int64_t (*multiply_bf16)(int64_t rounds, int32_t* out) = nullptr;  // as multiply_registers
};

}  // namespace kt
