// Kernels of a tier with tile registers that are compiled in a file of their own (parts/tiles_bf16.cpp): see
// KernelTable.
#pragma once
#include "runtime/types.h"

namespace kt {
namespace KT_TIER {

void bf16_tiles(const TileArgs* a, int count);
void round_bf16(const float* x, int64_t ldx, int64_t count, int64_t width, uint16_t* out, int64_t ldo);
int64_t multiply_bf16(int64_t rounds, int32_t* out);

}  // namespace KT_TIER
}  // namespace kt
