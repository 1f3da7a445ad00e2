// Recurrent layers over the rows of a step; kernels/common/recurrent.inl has the arithmetic, runtime/recurrent.h the
// arguments. Rows of no sequence give zeros. All throw std::invalid_argument for a step that does not fit its slots, or
// in which a slot that one sequence writes is read or written by another.
#pragma once
#include "runtime/pool.h"

namespace kt {

void causal_conv(WorkerPool& pool, const RecurrentStep& step, ConvArgs args);
void delta_scan(WorkerPool& pool, const RecurrentStep& step, ScanArgs args);
void linear_scan(WorkerPool& pool, const RecurrentStep& step, ScanArgs args);
void selective_scan(WorkerPool& pool, const RecurrentStep& step, SelectiveArgs args);

// Groups of `group` columns of each row; gate: rows gate_row apart, groups gate_group apart. weight: [group] for all
// groups, or [groups * group] if weight_group is `group` instead of 0. x, out [rows, groups * group], may be the same.
struct GatedNorm {
  GatedNormSpec spec;
  const float *x, *gate, *weight;
  int64_t rows, groups, group, gate_row, gate_group, weight_group;
  float* out;
};
void gated_norm(WorkerPool& pool, const GatedNorm& norm);

// decay = rate * softplus(a + bias), beta = sigmoid(b); a, b, decay, beta [rows, heads], rate, bias [heads].
void delta_gates(WorkerPool& pool, const float* a, const float* b, const float* rate, const float* bias, int64_t rows,
                 int64_t heads, float* decay, float* beta);

}  // namespace kt
