// What the machine can do at most: memory and registers.
#pragma once
#include <cstdint>

#include "runtime/pool.h"

namespace kt {

// Best of `repeats`, all threads at once: bytes read per second, and operations per second in registers, with int8,
// with fp32, and with bf16 (0 where the tier has none).
double read_bandwidth(WorkerPool& pool, const uint8_t* data, int64_t bytes, int repeats);
double int8_peak(WorkerPool& pool, int repeats);
double fp32_peak(WorkerPool& pool, int repeats);
double bf16_peak(WorkerPool& pool, int repeats);

}  // namespace kt
