// Blocks of ggml types without a kernel into blocks of types that have one, without losing a bit;
// ktransformers/weights/quantize/transcode.py says why that is so.
#pragma once
#include <cstdint>

namespace kt {

// `type` is ggml's number: Q5_0 and IQ4_NL become Q8_0, Q3_K becomes Q6_K. Throws std::invalid_argument for others.
void transcode(int type, const uint8_t* blocks, int64_t count, uint8_t* out);

}  // namespace kt
