// Rows times matrices.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "ops/weights/weights.h"

namespace kt {

// out[t, n] = sum_k x[t, k] weight[n, k] + bias[n]; bias may be null. x and out are contiguous.
void linear(WorkerPool& pool, const float* x, int64_t tokens, const WeightView& weight, const float* bias, float* out);

// Several matrices of the same columns times the same rows, in one go.
struct LinearPart {
  WeightView weight;
  const float* bias;        // or nullptr
  float* out;               // [tokens, rows]
  Part part = Part::Other;  // what the profile calls it; Other: as the others of the call
};
void linear_parts(WorkerPool& pool, const float* x, int64_t tokens, std::initializer_list<LinearPart> parts);

// out[t, b, n] = sum_k x[t, b, k] weight[b, n, k]; x and out contiguous. part: what the profile calls it.
void batched_linear(WorkerPool& pool, const float* x, int64_t tokens, int64_t batch, const WeightView& weight,
                    float* out, Part part = Part::Attention);

}  // namespace kt
