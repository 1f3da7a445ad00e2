// See group_blocks.h.
#include "ops/weights/group_blocks.h"

#include <cstring>
#include <stdexcept>

namespace kt {
namespace {

void halve(const uint8_t* pairs, uint8_t* out) {
  for (int i = 0; i < 8; ++i) {
    const uint8_t first = pairs[i], second = pairs[8 + i];
    out[2 * i] = static_cast<uint8_t>((first & 15) | second << 4);
    out[2 * i + 1] = static_cast<uint8_t>(first >> 4 | (second & 0xf0));
  }
}

}  // namespace

void write_group_blocks(const GroupRows& in, uint8_t* out) {
  if (in.rows < 0 || in.cols < 0 || in.size <= 0 || in.size % 32 != 0 || in.cols % in.size != 0 || in.group <= 0 ||
      in.piece_bytes <= 0 || in.piece_bytes > 8 || (in.cols + in.group - 1) / in.group > in.groups)
    throw std::invalid_argument("rows of groups whose sizes do not fit");
  const int64_t blocks = in.cols / in.size, code_bytes = in.is_paired ? in.size / 2 : in.size;
  const auto piece_bytes = static_cast<size_t>(in.piece_bytes);
  for (int64_t row = 0; row < in.rows; ++row)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t group = row * in.groups + b * in.size / in.group;
      const uint8_t* codes = in.codes + (row * blocks + b) * code_bytes;
      if (in.numbers != nullptr) {
        std::memcpy(out, in.numbers + 4 * row, 4);
        out += 4;
      }
      std::memcpy(out, in.scales + group * in.piece_bytes, piece_bytes);
      out += in.piece_bytes;
      if (in.zeros != nullptr) *out++ = in.zeros[group];
      if (!in.is_paired) std::memcpy(out, codes, static_cast<size_t>(code_bytes));
      for (int64_t at = 0; in.is_paired && at < code_bytes; at += 16) halve(codes + at, out + at);
      out += code_bytes;
    }
}

}  // namespace kt
