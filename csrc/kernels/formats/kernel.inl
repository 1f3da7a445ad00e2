// How the table of weight types (runtime/formats.h) reaches a tier's kernels. Included by a tier file before all that
// computes with weights.

#include <utility>

#include "runtime/formats.h"
#include "runtime/grouped.h"

namespace {

using namespace kt;

// A record of the table, as a type.
template <int I> struct Format {
  static constexpr const FormatInfo& info = kFormats[I];
  static constexpr QType type = kFormats[I].type;
};

template <class Task, int... I>
inline bool visit_formats(QType type, const Task& task, std::integer_sequence<int, I...>) {
  return ((kFormats[I].type == type && (task(Format<I>{}), true)) || ...);
}

// Calls task(Format<I>{}) for the record of `type`, and returns true; false for a type that is not in the table.
template <class Task> inline bool with_format(QType type, const Task& task) {
  return visit_formats(type, task, std::make_integer_sequence<int, kNumFormats>{});
}

// What computes with packed weights of a type. A specialization stands beside its kernels in packed/; it has
//   Packed                        where its codes and scales lie
//   Steps                         products of bf16 (bf16/bf16.inl)
//   tile(const TileArgs&)         adds to args.acc
//   pack(rows, k, out)            packs 16 rows of k columns
template <QType> struct Kernel;

template <class P> struct Steps256;  // these are in bf16/bf16.inl
template <class P> struct Steps32;
template <class P> struct StepsSmall;
template <class P> struct StepsTernary;
template <class P> struct StepsGrid;

// How a block of a type in rows becomes fp32: block(bytes, out), or, of a type with a scale for whole rows,
// scaled(bytes, scale, out). Specializations stand beside the layouts.
template <QType> struct Dequantizer;

// What computes with a type in rows without packing them: F is its layout. void: blocks are packed one at a time.
template <QType> struct RowKernel { using F = void; };

// Whether the kernels' blocks, of 32 or 256 columns, have the bytes that the record says.
template <class F>
constexpr bool kIsPackedAsSaid =
    Kernel<F::type>::Packed::bytes * F::info.block / (F::info.form == ActForm::Q32 ? 32 : 256) == F::info.packed_bytes;

}  // namespace
