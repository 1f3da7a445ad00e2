// The tile registers of AMX in plain C++, after the operation sections of Intel's manual: what tiles_amx.h does on a
// machine that has them. For tests.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd/bf16_emulated.h"

namespace {

struct EmulatedTile {
  int rows = 0, row_bytes = 0;
  uint8_t data[16][64] = {};
};
thread_local EmulatedTile tile_file[8];

inline void tiles_begin(int tokens, int k) {
  for (int i = 0; i < 8; ++i) {
    tile_file[i] = {};
    tile_file[i].rows = i < 6 ? tokens : k / 4;
    tile_file[i].row_bytes = i == 4 || i == 5 ? k : 64;
  }
}
inline void tiles_end() {
  for (EmulatedTile& tile : tile_file) tile = {};
}
inline void tiles_see_memory() {}

inline void tile_zero(int t) { std::memset(tile_file[t].data, 0, sizeof tile_file[t].data); }
inline void tile_load(int t, const void* p, int64_t stride) {
  EmulatedTile& tile = tile_file[t];
  tile_zero(t);
  for (int r = 0; r < tile.rows; ++r)
    std::memcpy(tile.data[r], static_cast<const uint8_t*>(p) + r * stride, static_cast<size_t>(tile.row_bytes));
}
inline void tile_store(int t, void* p, int64_t stride) {
  const EmulatedTile& tile = tile_file[t];
  for (int r = 0; r < tile.rows; ++r)
    std::memcpy(static_cast<uint8_t*>(p) + r * stride, tile.data[r], static_cast<size_t>(tile.row_bytes));
}
inline void tile_dot(int sum, int act, int weight, bool is_signed) {
  EmulatedTile& out = tile_file[sum];
  for (int m = 0; m < out.rows; ++m)
    for (int k = 0; k < tile_file[act].row_bytes / 4; ++k)
      for (int n = 0; n < out.row_bytes / 4; ++n) {
        int32_t value;
        std::memcpy(&value, out.data[m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i) {
          const uint8_t w = tile_file[weight].data[k][4 * n + i];
          value += static_cast<int8_t>(tile_file[act].data[m][4 * k + i]) *
                   (is_signed ? static_cast<int8_t>(w) : static_cast<int>(w));
        }
        std::memcpy(out.data[m] + 4 * n, &value, 4);
      }
}

// TDPBF16PS: for every output a chain of fused multiplications over the even columns and one over the odd ones, both
// from zero; their sum is added to the tile. Round to nearest even; subnormal operands and results count as zeros.
inline void tile_dot_bf16(int sum, int act, int weight) {
  EmulatedTile& out = tile_file[sum];
  for (int m = 0; m < out.rows; ++m)
    for (int n = 0; n < out.row_bytes / 4; ++n) {
      float chain[2] = {0.0f, 0.0f}, value;
      for (int k = 0; k < tile_file[act].row_bytes / 4; ++k)
        for (int i = 0; i < 2; ++i) {
          const float x = widen_bf16(tile_file[act].data[m] + 4 * k + 2 * i),
                      w = widen_bf16(tile_file[weight].data[k] + 4 * n + 2 * i);
          chain[i] = flush_subnormal(__builtin_fmaf(x, w, chain[i]));
        }
      std::memcpy(&value, out.data[m] + 4 * n, 4);
      value = flush_subnormal(flush_subnormal(value) + flush_subnormal(chain[0] + chain[1]));
      std::memcpy(out.data[m] + 4 * n, &value, 4);
    }
}

#define KT_TILE_ZERO(t) tile_zero(t)
#define KT_TILE_LOAD(t, p, stride) tile_load(t, p, stride)
#define KT_TILE_STORE(t, p, stride) tile_store(t, p, stride)
#define KT_TILE_DOT_UNSIGNED(sum, act, weight) tile_dot(sum, act, weight, false)
#define KT_TILE_DOT_SIGNED(sum, act, weight) tile_dot(sum, act, weight, true)
#define KT_TILE_DOT_BF16(sum, act, weight) tile_dot_bf16(sum, act, weight)

}  // namespace
