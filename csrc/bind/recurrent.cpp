// Kernels of recurrent layers for Python; see bind.cpp, of which this is a part.
#include "bind/bind.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>

#include "bind/args.h"
#include "bind/recurrent.h"
#include "ops/recurrent/recurrent.h"

namespace nb = nanobind;

using kt::Address;
using kt::at;

// addresses: of the arguments in the order in which kernels/cpu/recurrent.py says; 0: none.
void bind_recurrent(nb::module_& m) {
  m.attr("MAX_CONV_WIDTH") = kt::kMaxConvWidth;
  // addresses: x, weight, bias, out, states; sizes: stride of x, channels, width, strides of the weight
  m.def(
      "causal_conv",
      [](kt::WorkerPool& pool, const StepTuple& step, const std::array<Address, 5>& addresses,
         const std::array<int64_t, 5>& sizes, bool is_silu) {
        kt::ConvArgs a{};
        a.x = at<const float>(addresses[0]);
        a.weight = at<const float>(addresses[1]);
        a.bias = at<const float>(addresses[2]);
        a.out = at<float>(addresses[3]);
        a.states = at<float>(addresses[4]);
        a.ldx = sizes[0];
        a.channels = sizes[1];
        a.width = static_cast<int>(sizes[2]);
        a.weight_channel = sizes[3];
        a.weight_tap = sizes[4];
        a.is_silu = is_silu;
        kt::causal_conv(pool, step_of(step), a);
      },
      nb::arg("pool"), nb::arg("step"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("is_silu"),
      nb::call_guard<nb::gil_scoped_release>());
  // addresses: q, k, v, decay, beta, out, states; strides: rows of the first five; sizes: key heads, heads, K, V.
  // kind: 0 linear, 1 delta with a decay per head, 2 per key. eps: negative for no norm.
  m.def(
      "scan_heads",
      [](kt::WorkerPool& pool, const StepTuple& step, const std::array<Address, 7>& addresses,
         const std::array<int64_t, 5>& strides, const std::array<int64_t, 4>& sizes, int kind, float eps, float scale) {
        kt::ScanArgs a{};
        a.q = at<const float>(addresses[0]);
        a.k = at<const float>(addresses[1]);
        a.v = at<const float>(addresses[2]);
        a.decay = at<const float>(addresses[3]);
        a.beta = at<const float>(addresses[4]);
        a.out = at<float>(addresses[5]);
        a.states = at<float>(addresses[6]);
        a.q_row = strides[0];
        a.k_row = strides[1];
        a.v_row = strides[2];
        a.decay_row = strides[3];
        a.beta_row = strides[4];
        a.key_heads = sizes[0];
        a.heads = sizes[1];
        a.dim_k = sizes[2];
        a.dim_v = sizes[3];
        a.is_per_key = kind == 2;
        a.has_norm = eps >= 0;
        a.norm_eps = eps;
        a.scale = scale;
        if (kind == 0)
          kt::linear_scan(pool, step_of(step), a);
        else
          kt::delta_scan(pool, step_of(step), a);
      },
      nb::arg("pool"), nb::arg("step"), nb::arg("addresses"), nb::arg("strides"), nb::arg("sizes"), nb::arg("kind"),
      nb::arg("eps"), nb::arg("scale"), nb::call_guard<nb::gil_scoped_release>());
  // addresses: x, dt, A, B, C, D, out, states; strides: rows of x, dt, B, C; sizes: channels, N
  m.def(
      "selective_scan",
      [](kt::WorkerPool& pool, const StepTuple& step, const std::array<Address, 8>& addresses,
         const std::array<int64_t, 4>& strides, const std::array<int64_t, 2>& sizes) {
        kt::SelectiveArgs a{};
        a.x = at<const float>(addresses[0]);
        a.dt = at<const float>(addresses[1]);
        a.a = at<const float>(addresses[2]);
        a.b = at<const float>(addresses[3]);
        a.c = at<const float>(addresses[4]);
        a.d = at<const float>(addresses[5]);
        a.out = at<float>(addresses[6]);
        a.states = at<float>(addresses[7]);
        a.x_row = strides[0];
        a.dt_row = strides[1];
        a.b_row = strides[2];
        a.c_row = strides[3];
        a.channels = sizes[0];
        a.size = sizes[1];
        kt::selective_scan(pool, step_of(step), a);
      },
      nb::arg("pool"), nb::arg("step"), nb::arg("addresses"), nb::arg("strides"), nb::arg("sizes"),
      nb::call_guard<nb::gil_scoped_release>());
  // addresses: x, gate, weight, out; sizes: rows, groups, columns of a group; strides of the gate: row, group; of the
  // weight: group
  m.def(
      "gated_norm",
      [](kt::WorkerPool& pool, const std::array<Address, 4>& addresses, const std::array<int64_t, 3>& sizes,
         const std::array<int64_t, 3>& strides, float eps, bool gate_first, int kind) {
        kt::gated_norm(pool, {{eps, gate_first, kt::act_spec(kind, 0, 0, false).kind},
                              at<const float>(addresses[0]),
                              at<const float>(addresses[1]),
                              at<const float>(addresses[2]),
                              sizes[0],
                              sizes[1],
                              sizes[2],
                              strides[0],
                              strides[1],
                              strides[2],
                              at<float>(addresses[3])});
      },
      nb::arg("pool"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("strides"), nb::arg("eps"),
      nb::arg("gate_first"), nb::arg("kind"), nb::call_guard<nb::gil_scoped_release>());
  // addresses: a, b, rate, bias, decay, beta
  m.def(
      "delta_gates",
      [](kt::WorkerPool& pool, const std::array<Address, 6>& addresses, int64_t rows, int64_t heads) {
        kt::delta_gates(pool, at<const float>(addresses[0]), at<const float>(addresses[1]),
                        at<const float>(addresses[2]), at<const float>(addresses[3]), rows, heads,
                        at<float>(addresses[4]), at<float>(addresses[5]));
      },
      nb::arg("pool"), nb::arg("addresses"), nb::arg("rows"), nb::arg("heads"),
      nb::call_guard<nb::gil_scoped_release>());
}
