// The Python face of runtime/profile.h; see bind.cpp.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "bind/bind.h"
#include "runtime/pool.h"

namespace nb = nanobind;

namespace {

// Whole records that are complete, without the GIL while they are copied.
nb::bytes drain(kt::Profile& profile) {
  int64_t ready = 0, taken = 0;
  {
    const nb::gil_scoped_release released;
    ready = profile.num_ready();
  }
  PyObject* made = PyBytes_FromStringAndSize(nullptr, ready);
  if (made == nullptr) throw nb::python_error();
  {
    char* const to = PyBytes_AS_STRING(made);
    const nb::gil_scoped_release released;
    taken = profile.take(to, ready);
  }
  if (taken != ready && _PyBytes_Resize(&made, taken) != 0) throw nb::python_error();  // somebody else took some
  return nb::steal<nb::bytes>(made);
}

kt::Part part_at(int part) {
  if (part < 0 || part >= static_cast<int>(kt::part_names().size()))
    throw std::invalid_argument("there is no part number " + std::to_string(part));
  return static_cast<kt::Part>(part);
}

// For tests: `threads` threads write `each` operations each, whose rows are their numbers and whose layers the
// threads'.
void write_ops(kt::Profile& profile, int threads, int each) {
  std::vector<std::thread> writers;
  for (int t = 0; t < threads; ++t)
    writers.emplace_back([&profile, t, each] {
      for (int i = 0; i < each; ++i) {
        kt::OpRecord record{};
        record.rows = i;
        record.bytes = static_cast<uint64_t>(i) * 3 + static_cast<uint64_t>(t);
        profile.write(record, t);
        if (i % 5 == 0) {
          const std::vector<int64_t> ids(static_cast<size_t>(i % 7 + 1), i % 11);
          profile.write_experts(t, ids.data(), static_cast<int64_t>(ids.size()), 1, 11);
        }
      }
    });
  for (std::thread& writer : writers) writer.join();
}

}  // namespace

void bind_profile(nb::module_& m) {
  m.attr("PROFILE_RING_BYTES") = kt::kRingBytes;
  m.def("profile_parts", [] {
    std::vector<std::string> names;
    for (const char* name : kt::part_names()) names.emplace_back(name);
    return names;
  });
  // Of the calling thread: layer (-1: none) and part's number. Returns those before.
  m.def(
      "set_profile_scope",
      [](int layer, int part) {
        const kt::ProfileScope old = kt::profile_scope();
        kt::profile_scope() = {static_cast<int16_t>(layer), part_at(part), 0};
        return std::pair<int, int>(old.layer, static_cast<int>(old.part));
      },
      nb::arg("layer"), nb::arg("part"));
  nb::class_<kt::Profile>(m, "Profile")
      .def("begin_step", &kt::Profile::begin_step, nb::arg("step"), nb::arg("rows"), nb::arg("keep"))
      .def("end_step", &kt::Profile::end_step, nb::arg("step"))
      .def("drain", &drain)
      .def_prop_ro("num_dropped", &kt::Profile::num_dropped)
      .def("_write_ops", &write_ops, nb::arg("threads"), nb::arg("each"), nb::call_guard<nb::gil_scoped_release>());
}
