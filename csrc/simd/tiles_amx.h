// AMX tile registers. Which one holds what is fixed, because the instructions take it as an immediate:
//   0 - 3 sums, 4 - 5 activations, 6 - 7 weights.
// tiles_emulated.h gives the same names in plain C++.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// The operand of ldtilecfg, palette 1 (Intel's manual, volume 1, 18.3).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums of `tokens` rows of 16 lanes; activations of `tokens` rows and k columns; weights of k / 4 steps.
inline void tiles_begin(int tokens, int k) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i < 6 ? tokens : k / 4);
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? k : 64);
  }
  // GCC's intrinsic says that it reads the first 8 bytes: GCC 12 left the others out, and ldtilecfg faults on them.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void tiles_end() { _tile_release(); }

// The intrinsics do not say that they read memory: nothing written before may be held back behind them.
inline void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

#define KT_TILE_ZERO(t) _tile_zero(t)
#define KT_TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define KT_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define KT_TILE_DOT_UNSIGNED(sum, act, weight) _tile_dpbsud(sum, act, weight)
#define KT_TILE_DOT_SIGNED(sum, act, weight) _tile_dpbssd(sum, act, weight)
#define KT_TILE_DOT_BF16(sum, act, weight) _tile_dpbf16ps(sum, act, weight)

}  // namespace
