// The table of weight types: one record for each says how large its blocks are, in a file and packed, and which
// kernels compute with it. Everything else is derived from it: sizes in ops/, dispatch in kernels/, sets and sizes in
// Python (bind.cpp exports it). A new type is a record here, and a Kernel and a Dequantizer
// (kernels/formats/kernel.inl) beside its layout or its arithmetic. Weights in groups: grouped.h.
// No code lives here: see types.h.
#pragma once
#include <cstdint>

namespace kt {

// ggml's type numbers (ggml.h, enum ggml_type), exported to Python by bind.cpp. F8_E4M3, which ggml does not have, lies
// outside their range; it exists in packed form only (fp8.inl).
enum class QType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  NVFP4 = 40,
  Q1_0 = 41,
  IQ2_K = 137,  // from here on of ik_llama.cpp
  IQ3_K = 138,
  IQ4_K = 139,
  IQ5_K = 140,
  IQ6_K = 141,
  IQ4_KS = 144,
  IQ2_KS = 145,
  IQ4_KSS = 146,
  IQ5_KS = 152,
  IQ2_KT = 153,
  IQ3_KT = 154,
  IQ4_KT = 155,
  IQ3_KS = 156,
  IQ2_KL = 157,
  IQ1_KT = 158,
  F8_E4M3 = 1000
};

// What a weight type wants its activations to be.
//   Float: fp32 as given.
//   Q32:   int8 with one fp32 scale per 32 values, and two int16: the sum of the 32, and that of the first 16.
//   Q256:  int8 with one fp32 scale per 256 values, and as int16: 16 sums of 16 values, 8 sums of 32 values, and for
//          every 16 values a pair: -32 times the sums of those whose index mod 4 is 0 or 1, and 2 or 3 (tiers that sum
//          in int16).
enum class ActForm : int32_t { Float = 0, Q32 = 1, Q256 = 2 };

constexpr int kFp8Block = 128;  // rows and columns of FP8 weights that share a scale

// Which files of kernels/ compute with a type.
enum class Kernels : int32_t {
  Plain = 0,    // formats/gemm.inl: numbers, in rows. BF16 is packed for products of bf16 alone
  Packed = 1,   // packed/packed.inl, signed.inl, iqk.inl: K-quants, Q8_0, Q4_0; IQ4_XS and ik_llama.cpp's
  Low = 2,      // packed/small.inl, k2k3.inl, ternary.inl: the types of formats/low.inl, and MXFP4
  Grid = 3,     // packed/grid.inl: codes that are looked up in a grid
  Fp8 = 4,      // packed/fp8.inl
  Trellis = 5,  // packed/trellis.inl: codes that are seeds of values
};

// Where the fp16 numbers of a block are, bytes from its start; -1: there is none. None of MXFP4 and NVFP4, whose scales
// are bytes, nor of IQ1_M, whose half lies in four places.
struct HalvesAt { int first = -1, second = -1; };

struct FormatInfo {
  QType type;
  const char* name;
  int block;     // elements in a block
  int bytes;     // bytes in a block of a row
  ActForm form;  // what linear() does to the activations
  Kernels kernels = Kernels::Plain;
  // A tile of 16 rows, packed: a head of `head_bytes` for every `head_cols` columns, padded to 64 bytes, then
  // `packed_bytes` for every block. 0: the type has no packed form.
  int head_cols = 0, head_bytes = 0, packed_bytes = 0;
  HalvesAt halves = {};
  int row_head = 0;  // bytes in front of a row's blocks: a scale of all of them, fp32 (4) or fp16 (2)
};

// Halves d of 16 rows; d and m; bytes; fp32 d.
constexpr int kHalves = 32, kPairsOfHalves = 64, kBytes = 16, kFloats = 64;
constexpr int kWholeRow = 1 << 30;  // columns, of a head with one number a row

constexpr FormatInfo kFormats[] = {
    {QType::F32, "F32", 1, 4, ActForm::Float},
    {QType::F16, "F16", 1, 2, ActForm::Float},
    {QType::BF16, "BF16", 1, 2, ActForm::Float, Kernels::Plain, 1, 0, 32},
    {QType::Q4_0, "Q4_0", 32, 18, ActForm::Q32, Kernels::Packed, 32, kHalves, 256, {0}},
    {QType::Q4_1, "Q4_1", 32, 20, ActForm::Q32, Kernels::Low, 32, kPairsOfHalves, 256, {0, 2}},
    {QType::Q5_0, "Q5_0", 32, 22, ActForm::Q32, Kernels::Low, 32, kHalves, 320, {0}},
    {QType::Q5_1, "Q5_1", 32, 24, ActForm::Q32, Kernels::Low, 32, kPairsOfHalves, 320, {0, 2}},
    {QType::Q8_0, "Q8_0", 32, 34, ActForm::Q32, Kernels::Packed, 32, kHalves, 512, {0}},
    {QType::Q2_K, "Q2_K", 256, 84, ActForm::Q256, Kernels::Low, 256, 0, 1344, {80, 82}},
    {QType::Q3_K, "Q3_K", 256, 110, ActForm::Q256, Kernels::Low, 256, kHalves, 1792, {108}},
    {QType::Q4_K, "Q4_K", 256, 144, ActForm::Q256, Kernels::Packed, 256, 0, 2368, {0, 2}},
    {QType::Q5_K, "Q5_K", 256, 176, ActForm::Q256, Kernels::Packed, 256, 0, 2880, {0, 2}},
    {QType::Q6_K, "Q6_K", 256, 210, ActForm::Q256, Kernels::Packed, 256, kHalves, 3328, {208}},
    {QType::IQ4_NL, "IQ4_NL", 32, 18, ActForm::Q32, Kernels::Low, 32, kHalves, 256, {0}},
    {QType::IQ4_XS, "IQ4_XS", 256, 136, ActForm::Q256, Kernels::Packed, 256, kHalves, 2176, {0}},
    {QType::IQ2_K, "IQ2_K", 256, 76, ActForm::Q256, Kernels::Packed, 256, kHalves, 1216, {0}},
    {QType::IQ3_K, "IQ3_K", 256, 110, ActForm::Q256, Kernels::Packed, 256, kHalves, 1792, {0}},
    {QType::IQ4_K, "IQ4_K", 256, 144, ActForm::Q256, Kernels::Packed, 256, kHalves, 2304, {0}},
    {QType::IQ5_K, "IQ5_K", 256, 176, ActForm::Q256, Kernels::Packed, 256, kHalves, 2816, {0}},
    {QType::IQ6_K, "IQ6_K", 256, 212, ActForm::Q256, Kernels::Packed, 256, kHalves, 3392, {0}},
    {QType::IQ2_KS, "IQ2_KS", 256, 70, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 1152, {}, 2},
    {QType::IQ3_KS, "IQ3_KS", 256, 102, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 1664, {}, 2},
    {QType::IQ2_KL, "IQ2_KL", 256, 86, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 1664, {}, 2},
    {QType::IQ4_KS, "IQ4_KS", 256, 136, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 2176, {}, 4},
    {QType::IQ4_KSS, "IQ4_KSS", 256, 128, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 2176, {}, 4},
    {QType::IQ5_KS, "IQ5_KS", 256, 168, ActForm::Q256, Kernels::Packed, kWholeRow, kFloats, 2688, {}, 4},
    {QType::IQ1_KT, "IQ1_KT", 256, 56, ActForm::Q256, Kernels::Trellis, kWholeRow, kFloats, 896, {}, 4},
    {QType::IQ2_KT, "IQ2_KT", 256, 68, ActForm::Q256, Kernels::Trellis, kWholeRow, kFloats, 1088, {}, 4},
    {QType::IQ3_KT, "IQ3_KT", 256, 100, ActForm::Q256, Kernels::Trellis, kWholeRow, kFloats, 1600, {}, 4},
    {QType::IQ4_KT, "IQ4_KT", 256, 128, ActForm::Q256, Kernels::Trellis, kWholeRow, kFloats, 2176, {}, 4},
    {QType::IQ2_XXS, "IQ2_XXS", 256, 66, ActForm::Q256, Kernels::Grid, 256, kHalves, 1024, {0}},
    {QType::IQ2_XS, "IQ2_XS", 256, 74, ActForm::Q256, Kernels::Grid, 256, kHalves, 1152, {0}},
    {QType::IQ2_S, "IQ2_S", 256, 82, ActForm::Q256, Kernels::Grid, 256, kHalves, 1280, {0}},
    {QType::IQ3_XXS, "IQ3_XXS", 256, 98, ActForm::Q256, Kernels::Grid, 256, kHalves, 1536, {0}},
    {QType::IQ3_S, "IQ3_S", 256, 110, ActForm::Q256, Kernels::Grid, 256, kHalves, 1728, {0}},
    {QType::IQ1_S, "IQ1_S", 256, 50, ActForm::Q256, Kernels::Grid, 256, kHalves, 768, {0}},
    {QType::IQ1_M, "IQ1_M", 256, 56, ActForm::Q256, Kernels::Grid, 256, kHalves, 896},
    {QType::TQ1_0, "TQ1_0", 256, 54, ActForm::Q256, Kernels::Low, 256, kHalves, 832, {52}},
    {QType::TQ2_0, "TQ2_0", 256, 66, ActForm::Q256, Kernels::Low, 256, kHalves, 1024, {64}},
    {QType::MXFP4, "MXFP4", 32, 17, ActForm::Q32, Kernels::Low, 32, kBytes, 256},
    {QType::NVFP4, "NVFP4", 64, 36, ActForm::Q32, Kernels::Low, 32, kHalves, 512},
    {QType::Q1_0, "Q1_0", 128, 18, ActForm::Q32, Kernels::Low, 128, kHalves, 256, {0}},
    {QType::F8_E4M3, "F8_E4M3", 4, 4, ActForm::Float, Kernels::Fp8, kFp8Block, 4, 64},
};
// Whether a block is looked up, or made of seeds, once for all tokens of a call (packed/grid.inl).
constexpr bool is_staged(const FormatInfo& info) {
  return info.kernels == Kernels::Grid || info.kernels == Kernels::Trellis;
}
constexpr int kNumFormats = static_cast<int>(sizeof kFormats / sizeof *kFormats);

}  // namespace kt
