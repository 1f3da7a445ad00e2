// The Python face of ops/store; see bind.cpp.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bind/args.h"
#include "bind/bind.h"
#include "ops/store/expert_store.h"
#include "ops/store/row_store.h"

namespace nb = nanobind;

namespace {

using Part = std::tuple<int, int64_t, int64_t, int, int64_t>;  // type, rows, cols, layout, offset in the record
using Place = std::tuple<int32_t, int64_t, int64_t>;           // file, offset, bytes

std::vector<kt::Extent> extents_of(const std::vector<Place>& places) {
  std::vector<kt::Extent> made;
  for (const auto& [file, offset, nbytes] : places) made.push_back({file, offset, nbytes});
  return made;
}

int64_t add_layer(kt::ExpertStore& store, const std::vector<Part>& parts, int64_t record_nbytes,
                  const std::vector<std::vector<Place>>& extents) {
  std::vector<kt::RecordPart> made;
  for (const auto& [type, rows, cols, layout, offset] : parts)
    made.push_back({kt::weight_at(0, type, rows, cols, layout), offset});
  std::vector<std::vector<kt::Extent>> places;
  for (const std::vector<Place>& of_expert : extents) places.push_back(extents_of(of_expert));
  return store.add_layer(std::move(made), record_nbytes, places);
}

}  // namespace

void bind_store(nb::module_& m) {
  using kt::ExpertStore;
  nb::exception<kt::ReadError>(m, "ReadError", PyExc_RuntimeError);
  nb::exception<kt::StoreTooSmall>(m, "StoreTooSmall", PyExc_RuntimeError);
  m.attr("DISK_BLOCK") = kt::kDiskBlock;
  nb::class_<ExpertStore>(m, "ExpertStore")
      .def(
          "__init__",
          [](ExpertStore* self, const std::vector<std::string>& paths, const kt::WorkerPool& pool, int num_threads) {
            new (self) ExpertStore(paths, pool.kernels(), num_threads);
          },
          nb::arg("paths"), nb::arg("pool"), nb::arg("num_threads"))
      .def("is_direct", &ExpertStore::is_direct, nb::arg("file"))
      .def("add_layer", &add_layer, nb::arg("parts"), nb::arg("record_nbytes"), nb::arg("extents"))
      .def("open", &ExpertStore::open, nb::arg("budget_nbytes"), nb::arg("top_k"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("probe", &ExpertStore::probe, nb::arg("is_on"), nb::call_guard<nb::gil_scoped_release>())
      .def("fill", &ExpertStore::fill, nb::arg("scores"), nb::arg("wait"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "hold",
          [](ExpertStore& self, int64_t layer, int64_t expert) {
            return reinterpret_cast<uintptr_t>(self.hold(layer, expert));
          },
          nb::arg("layer"), nb::arg("expert"))
      .def(
          "read",
          [](ExpertStore& self, int64_t layer, const std::vector<int64_t>& experts) {
            std::vector<uintptr_t> found;
            for (const uint8_t* one : self.read(layer, experts)) found.push_back(reinterpret_cast<uintptr_t>(one));
            return found;
          },
          nb::arg("layer"), nb::arg("experts"), nb::call_guard<nb::gil_scoped_release>())
      .def("release", &ExpertStore::release, nb::arg("layer"), nb::arg("expert"), nb::arg("is_kept"))
      .def("max_held", &ExpertStore::max_held, nb::arg("layer"))
      .def("memory",
           [](ExpertStore& self) {
             const auto [data, nbytes] = self.memory();
             return std::make_tuple(reinterpret_cast<uintptr_t>(data), nbytes);
           })
      .def("close", &ExpertStore::close, nb::call_guard<nb::gil_scoped_release>())
      .def("scores", &ExpertStore::scores)
      .def("stats",
           [](ExpertStore& self) {
             const kt::StoreStats s = self.stats();
             return std::make_tuple(s.hits, s.misses, s.bytes_read, s.waited_ns, s.read_errors, s.num_slots,
                                    s.num_records, s.num_filled, s.slot_nbytes);
           })
      .def("take_retried", &ExpertStore::take_retried)
      // For tests, see ops/store/reader.h.
      .def("_held", &ExpertStore::held)
      .def(
          "_hold", [](ExpertStore& self, bool is_held) { self.reader().hold(is_held); }, nb::arg("is_held"))
      .def(
          "_fail_next", [](ExpertStore& self, int count) { self.reader().fail_next(count); }, nb::arg("count"))
      .def(
          "_pass", [](ExpertStore& self, int64_t count) { self.reader().pass(count); }, nb::arg("count"))
      .def(
          "_set_quiet", [](ExpertStore& self, int64_t ns) { self.reader().set_quiet(ns); }, nb::arg("ns"))
      .def("_slow_down", [](ExpertStore& self, int times) { self.reader().slow_down(times); }, nb::arg("times"));
  using kt::RowStore;
  nb::class_<RowStore>(m, "RowStore")
      .def(
          "__init__",
          [](RowStore* self, const std::vector<std::string>& paths, const kt::WorkerPool& pool, int type, int64_t cols,
             const std::vector<Place>& parts, int64_t cache_nbytes) {
            new (self)
                RowStore(paths, pool.kernels(), kt::weight_at(0, type, 1, cols), extents_of(parts), cache_nbytes);
          },
          nb::arg("paths"), nb::arg("pool"), nb::arg("type"), nb::arg("cols"), nb::arg("parts"),
          nb::arg("cache_nbytes"))
      .def("is_direct", &RowStore::is_direct, nb::arg("file"))
      .def(
          "gather",
          [](RowStore& self, kt::WorkerPool& pool, kt::Address ids, int64_t count, kt::Address out) {
            self.gather(pool, kt::at<const int64_t>(ids), count, kt::at<float>(out));
          },
          nb::arg("pool"), nb::arg("ids"), nb::arg("count"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &RowStore::close, nb::call_guard<nb::gil_scoped_release>())
      .def("take_retried", &RowStore::take_retried)
      .def("stats",
           [](RowStore& self) {
             const kt::RowStats s = self.stats();
             return std::make_tuple(s.hits, s.misses, s.bytes_read, s.waited_ns, s.read_errors);
           })
      .def(
          "_hold", [](RowStore& self, bool is_held) { self.reader().hold(is_held); }, nb::arg("is_held"))
      .def("_fail_next", [](RowStore& self, int count) { self.reader().fail_next(count); }, nb::arg("count"));
}
