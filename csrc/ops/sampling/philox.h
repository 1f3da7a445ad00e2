// Random numbers that depend on a seed and a position alone.
#pragma once
#include <cstdint>

namespace kt {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011), in place.
void philox4x32(uint32_t (&counter)[4], uint32_t (&key)[2]);

// A number in [0, 1) with 53 random bits: key = seed, counter = position.
double uniform_at(uint64_t seed, uint64_t position);

}  // namespace kt
