// Hyper-connections (DeepSeek-V4, arXiv 2512.24880): streams of a token become the input of a block, and its result is
// mixed with them.
//
//   N streams of H columns each, S shares of their N H columns
//
//   w    = fn x / rms(x)                                   [(2 + N) N]: before, behind, between
//   pre  = sigmoid(w_0 scale_0 + base_0) + eps             post = 2 sigmoid(w_1 scale_1 + base_1)
//   comb = softmax(w_2 scale_2 + base_2) + eps            [N, N], then columns and rows are divided by their sums
//   collapsed = sum_n pre[n] x[n]                          mixed[m] = post[m] y + sum_n comb[n, m] x[n]
//
// A row's numbers are added in an order that its streams alone decide: products within a share as `batched_linear`
// does, shares in ascending order, squares in 16 lanes and then pairwise.
#pragma once
#include <cstdint>

#include "ops/weights/weights.h"

namespace kt {

constexpr int64_t kMaxStreams = 8;

struct HyperSpec {
  int64_t streams, hidden, shares;
  int64_t iterations;  // how often columns are divided by their sums; rows are once less
  float eps, norm_eps;

  int64_t width() const { return (2 + streams) * streams; }
  int64_t columns() const { return streams * hidden; }
};

// fn: fp32 [S, (2 + N) N, N H / S]; base [(2 + N) N]; scale [3].
struct HyperWeights { const float *fn, *base, *scale; };

// x: [T, N, H]. post: [T, N], comb: [T, N, N], out: [T, H], written. products: [T, S, (2 + N) N], memory.
void collapse_streams(WorkerPool& pool, const HyperSpec& spec, const HyperWeights& weights, const float* x,
                      int64_t rows, float* products, float* post, float* comb, float* out);

// x: [T, N, H], replaced by what it is mixed to with y [T, H].
void mix_streams(WorkerPool& pool, int64_t streams, int64_t hidden, const float* y, const float* post,
                 const float* comb, int64_t rows, float* x);

// Streams with gates (Qwen4's). x, out: [T, N H], each stream normalized by RMS and multiplied with its part of weight
// [N H].
void norm_streams(WorkerPool& pool, const float* x, const float* weight, int64_t rows, int64_t streams, int64_t hidden,
                  float eps, float* out);

// out [T, H] = mean of sigmoid(gates[n]) normed[n]; gates, normed: [T, N, H]. gates are overwritten.
void gate_streams(WorkerPool& pool, const float* normed, int64_t rows, int64_t streams, int64_t hidden, float* gates,
                  float* out);

}  // namespace kt
