// Types of weights whose groups of columns have scales of their own, as safetensors hold them: what their numbers mean.
// They are no enumerators of QType, but 2048 and what kernels/packed/groups.inl does with them, in bits. All of this
// has internal linkage, for it is included by files that are compiled for different instruction sets.
#pragma once
#include "runtime/types.h"

namespace kt {
namespace {

// I4, I8: signed integers. F8: e4m3fn. E2M1: the 4-bit numbers of MXFP4 and NVFP4.
enum class CodeKind : int32_t { I4 = 0, I8 = 1, F8 = 2, E2M1 = 3 };
// E4M3: under one fp32 number for each row besides; of E2M1 alone, which has no others.
enum class ScaleKind : int32_t { F16 = 0, BF16 = 1, F32 = 2, E8M0 = 3, E4M3 = 4 };

constexpr int kFirstGrouped = 2048;
constexpr bool is_grouped(QType type) { return static_cast<int>(type) >= kFirstGrouped; }

struct GroupForm {
  CodeKind codes;
  ScaleKind scales;
  bool has_zero;  // an int8 beside the scale: w = scale (code - zero)
  int size;       // columns of a block in rows; of E2M1 two groups, else one

  constexpr explicit GroupForm(QType type)
      : codes(static_cast<CodeKind>(static_cast<int>(type) >> 5 & 3)),
        scales(static_cast<ScaleKind>(static_cast<int>(type) >> 2 & 7)),
        has_zero((static_cast<int>(type) >> 1 & 1) != 0),
        size((static_cast<int>(type) & 1) != 0 ? 128 : 32) {}
  constexpr GroupForm(CodeKind code, ScaleKind scale, bool zero, int columns)
      : codes(code), scales(scale), has_zero(zero), size(columns) {}

  constexpr QType type() const {
    return static_cast<QType>(kFirstGrouped + static_cast<int>(codes) * 32 + static_cast<int>(scales) * 4 +
                              (has_zero ? 2 : 0) + (size == 128 ? 1 : 0));
  }
  // Bytes in front of the codes of a block, and of a column's codes times 2.
  constexpr int scale_bytes() const {
    return scales == ScaleKind::F32 ? 4 : scales == ScaleKind::E8M0 ? 1 : scales == ScaleKind::E4M3 ? 6 : 2;
  }
  constexpr int head_bytes() const { return scale_bytes() + (has_zero ? 1 : 0); }
  constexpr bool is_byte() const { return codes == CodeKind::I8 || codes == CodeKind::F8; }
  constexpr int code_bytes() const { return is_byte() ? size : size / 2; }
  constexpr int block_bytes() const { return head_bytes() + code_bytes(); }

  // Of a packed tile of 16 rows: the head, and all of it.
  constexpr int64_t tile_head(int64_t cols) const {
    const int64_t bytes = scales == ScaleKind::E4M3 ? 64 + cols : cols / size * 16 * head_bytes();
    return (bytes + 63) / 64 * 64;
  }
  constexpr int64_t tile_bytes(int64_t cols) const { return tile_head(cols) + cols * (is_byte() ? 16 : 8); }
};

constexpr GroupForm kNvfp4(CodeKind::E2M1, ScaleKind::E4M3, false, 32);

}  // namespace
}  // namespace kt
