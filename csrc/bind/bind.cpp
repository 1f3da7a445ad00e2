// The Python face of the kernels: bind/ is the only code that knows Python. Pointers cross as integers;
// ktransformers/kernels/ checks shapes, types and ranges, and keeps every tensor alive during a call.
#include "bind/bind.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <tuple>

#include "bind/args.h"
#include "ops/weights/group_blocks.h"
#include "ops/layer/limits.h"
#include "ops/linear/linear.h"
#include "ops/linear/rows.h"
#include "ops/experts/routing.h"
#include "ops/experts/stream.h"
#include "ops/weights/transcode.h"
#include "runtime/allocations.h"
#include "runtime/files.h"
#include "runtime/pages.h"
#include "runtime/format_info.h"
#include "tiers/isa.h"

namespace nb = nanobind;

namespace {

using kt::act_spec;
using kt::Address;
using kt::at;
using kt::weight_at;

// (type, rows, cols, addresses of the experts, address of the bias or 0, layout)
using ProjectionTuple = std::tuple<int, int64_t, int64_t, std::vector<Address>, Address, int>;

// Appends the addresses of the experts to `pointers`.
kt::ExpertProjection projection(const ProjectionTuple& source, std::vector<const uint8_t*>& pointers) {
  kt::ExpertProjection p;
  p.type = static_cast<kt::QType>(std::get<0>(source));
  p.rows = std::get<1>(source);
  p.cols = std::get<2>(source);
  for (Address address : std::get<3>(source)) pointers.push_back(at<const uint8_t>(address));
  p.bias = at<const float>(std::get<4>(source));
  p.layout = kt::layout_of(std::get<5>(source));
  return p;
}

// name -> number of a KT_NAMED_ENUM
template <size_t count> nb::dict numbers_of(const char* const (&names)[count]) {
  nb::dict numbers;
  for (size_t i = 0; i < count; ++i) numbers[names[i]] = static_cast<int>(i);
  return numbers;
}

// (node, CPUs, whether these are slow) of a thread
using Place = std::tuple<int, std::vector<int>, bool>;

std::vector<kt::ThreadPlace> thread_places(const std::vector<Place>& places) {
  std::vector<kt::ThreadPlace> made;
  for (const auto& [node, cpus, is_slow] : places) made.push_back({node, cpus, is_slow});
  return made;
}

void bind_pool(nb::module_& m) {
  m.def(
      "share_tasks",
      [](const std::vector<int64_t>& ends, const std::vector<Place>& places) {
        return kt::share_tasks(ends, thread_places(places));
      },
      nb::arg("ends"), nb::arg("places"));
  nb::class_<kt::WorkerPool>(m, "WorkerPool")
      .def(
          "__init__",
          [](kt::WorkerPool* self, const std::vector<Place>& places, const std::string& isa, int planes) {
            new (self) kt::WorkerPool(thread_places(places), kt::tier_by_name(isa), planes);
          },
          nb::arg("places"), nb::arg("isa"), nb::arg("planes"))
      .def_prop_ro("num_nodes", &kt::WorkerPool::num_nodes)
      .def_prop_ro("num_bound", &kt::WorkerPool::num_bound)
      .def_prop_ro("num_jobs", &kt::WorkerPool::num_jobs)
      .def("rest_slow", &kt::WorkerPool::rest_slow, nb::arg("rests"))
      .def("close", &kt::WorkerPool::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "start_profile",
          [](kt::WorkerPool& self, int64_t ring_bytes) {
            self.start_profile(ring_bytes);
            return self.last_profile();
          },
          nb::arg("ring_bytes"), nb::rv_policy::reference_internal)
      .def("stop_profile", &kt::WorkerPool::stop_profile)
      .def("_slow_down", &kt::WorkerPool::slow_down, nb::arg("thread"), nb::arg("times"))
      .def("_hold", &kt::WorkerPool::hold, nb::arg("thread"), nb::arg("is_held"))
      // For tests: runs `count` tasks and returns how many of them each thread ran. Thread `stopped` is taken away in
      // the midst of its first one until all others are done; -1: none is. The caller's first task waits until all
      // threads of `awaited` have begun, or there is nothing left for them to begin with.
      .def(
          "_run_counted",
          [](kt::WorkerPool& self, int64_t count, int stopped, const std::vector<int>& awaited) {
            kt::WorkerPool::Session session(self);
            std::vector<std::atomic<int64_t>> num_of(static_cast<size_t>(session.num_threads()));
            std::atomic<int64_t> num_begun{0}, num_done{0};
            const auto have_begun = [&] {
              return num_begun == count || std::all_of(awaited.begin(), awaited.end(), [&](int thread) {
                       return num_of[static_cast<size_t>(thread)] > 0;
                     });
            };
            session.run(count, [&](int64_t, int thread) {
              ++num_begun;
              const bool is_first = num_of[static_cast<size_t>(thread)]++ == 0;
              if (is_first && thread == 0) session.wait_until(have_begun);
              if (is_first && thread == stopped) session.wait_until([&] { return num_done == count - 1; });
              ++num_done;
            });
            return std::vector<int64_t>(num_of.begin(), num_of.end());
          },
          nb::arg("count"), nb::arg("stopped"), nb::arg("awaited"), nb::call_guard<nb::gil_scoped_release>())
      // For tests: runs `count` tasks, of which number `failing` throws.
      .def(
          "_run_failing",
          [](kt::WorkerPool& self, int64_t count, int64_t failing) {
            kt::WorkerPool::Session session(self);
            session.run(count, [failing](int64_t i) {
              if (i == failing) throw std::runtime_error("task " + std::to_string(i) + " failed");
            });
          },
          nb::arg("count"), nb::arg("failing"), nb::call_guard<nb::gil_scoped_release>())
      // For tests: a job of two kinds of tasks, `count` of each. Those of the second wait for all of the first; returns
      // how many saw them done. Number `failing` of the first throws, -1: none.
      .def(
          "_run_both",
          [](kt::WorkerPool& self, int64_t count, int64_t failing) {
            kt::WorkerPool::Session session(self);
            std::atomic<int64_t> num_done{0}, num_seen{0};
            const kt::NodeEnds ends = {{count}, 1};
            const auto first = [&](int64_t i) {
              if (i == failing) throw std::runtime_error("task " + std::to_string(i) + " failed");
              ++num_done;
            };
            const auto second = [&](int64_t) {
              if (session.wait_until([&] { return num_done == count; })) ++num_seen;
            };
            session.run_both(ends, first, ends, second);
            return num_seen.load();
          },
          nb::arg("count"), nb::arg("failing"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_linear(nb::module_& m) {
  m.def(
      "linear",
      [](kt::WorkerPool& pool, Address x, int64_t tokens, Address weight, int type, int layout, int64_t rows,
         int64_t cols, Address bias, Address out) {
        kt::linear(pool, at<const float>(x), tokens, weight_at(weight, type, rows, cols, layout), at<const float>(bias),
                   at<float>(out));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("weight"), nb::arg("type"), nb::arg("layout"),
      nb::arg("rows"), nb::arg("cols"), nb::arg("bias"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "packed_tile_bytes",
      [](int type, int64_t cols) { return kt::packed_tile_bytes(static_cast<kt::QType>(type), cols); }, nb::arg("type"),
      nb::arg("cols"));
  m.def(
      "pack",
      [](kt::WorkerPool& pool, const std::vector<Address>& weights, int type, int64_t rows, int64_t cols, Address out) {
        std::vector<const uint8_t*> pointers;
        for (Address weight : weights) pointers.push_back(at<const uint8_t>(weight));
        kt::pack(pool, weight_at(0, type, rows, cols), pointers.data(), static_cast<int64_t>(pointers.size()),
                 at<uint8_t>(out));
      },
      nb::arg("pool"), nb::arg("weights"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("out"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pack_fp8",
      [](kt::WorkerPool& pool, const std::vector<std::pair<Address, Address>>& weights, int64_t rows, int64_t cols,
         Address out) {
        std::vector<kt::Fp8View> views;
        for (const auto& weight : weights)
          views.push_back({at<const uint8_t>(weight.first), at<const float>(weight.second)});
        kt::pack_fp8(pool, views.data(), static_cast<int64_t>(views.size()), rows, cols, at<uint8_t>(out));
      },
      nb::arg("pool"), nb::arg("weights"), nb::arg("rows"), nb::arg("cols"), nb::arg("out"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "transcode",
      [](int type, Address blocks, int64_t count, Address out) {
        kt::transcode(type, at<const uint8_t>(blocks), count, at<uint8_t>(out));
      },
      nb::arg("type"), nb::arg("blocks"), nb::arg("count"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "write_group_blocks",
      [](Address codes, bool is_paired, Address scales, int64_t piece_bytes, Address zeros, Address numbers,
         std::array<int64_t, 5> sizes, Address out) {
        const auto [rows, cols, groups, size, group] = sizes;
        kt::write_group_blocks({at<const uint8_t>(codes), at<const uint8_t>(scales), at<const uint8_t>(zeros),
                                at<const uint8_t>(numbers), rows, cols, groups, size, group, piece_bytes, is_paired},
                               at<uint8_t>(out));
      },
      nb::arg("codes"), nb::arg("is_paired"), nb::arg("scales"), nb::arg("piece_bytes"), nb::arg("zeros"),
      nb::arg("numbers"), nb::arg("sizes"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_ahead", [](Address data, int64_t bytes) { kt::read_ahead(at<const uint8_t>(data), bytes); },
      nb::arg("data"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "note_file", [](Address data, int64_t bytes, int fd) { kt::note_file(at<const uint8_t>(data), bytes, fd); },
      nb::arg("data"), nb::arg("bytes"), nb::arg("fd"));
  m.def("forget_file", [](Address data) { kt::forget_file(at<const uint8_t>(data)); }, nb::arg("data"));
  m.def(
      "drop_cached", [](Address data, int64_t bytes) { kt::drop_cached(at<const uint8_t>(data), bytes); },
      nb::arg("data"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def("pack_times", [] {
    const kt::PackTimes times = kt::pack_times();
    return std::pair(times.read_ns, times.pack_ns);
  });
  m.def(
      "copy_parts",
      [](kt::WorkerPool& pool, const std::vector<std::pair<Address, int64_t>>& parts, Address out) {
        std::vector<kt::Bytes> views;
        for (const auto& part : parts) views.push_back({at<const uint8_t>(part.first), part.second});
        kt::copy_parts(pool, views.data(), static_cast<int64_t>(views.size()), at<uint8_t>(out));
      },
      nb::arg("pool"), nb::arg("parts"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_grid",
      [](int type, const nb::bytes& values) {
        kt::set_grid(type, reinterpret_cast<const uint8_t*>(values.c_str()), values.size());
      },
      nb::arg("type"), nb::arg("values"));
  m.def("trim_heap", &kt::trim_heap, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "batched_linear",
      [](kt::WorkerPool& pool, Address x, int64_t tokens, int64_t batch, Address weight, int type, int64_t rows,
         int64_t cols, Address out) {
        kt::batched_linear(pool, at<const float>(x), tokens, batch, weight_at(weight, type, batch * rows, cols),
                           at<float>(out));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("batch"), nb::arg("weight"), nb::arg("type"),
      nb::arg("rows"), nb::arg("cols"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "dequantize_rows",
      [](kt::WorkerPool& pool, Address weight, int type, int64_t rows, int64_t cols, Address ids, int64_t count,
         Address out) {
        for (int64_t i = 0; i < count; ++i)
          if (at<const int64_t>(ids)[i] < 0 || at<const int64_t>(ids)[i] >= rows)
            throw std::out_of_range("ids[" + std::to_string(i) + "] is " + std::to_string(at<const int64_t>(ids)[i]) +
                                    ", but the weight has " + std::to_string(rows) + " rows");
        kt::dequantize_rows(pool, weight_at(weight, type, rows, cols), at<const int64_t>(ids), count, at<float>(out));
      },
      nb::arg("pool"), nb::arg("weight"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("ids"),
      nb::arg("count"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_rows(nb::module_& m) {
  m.def(
      "gather_rows",
      [](kt::WorkerPool& pool, const std::vector<std::pair<Address, int64_t>>& parts, int type, int64_t cols,
         Address ids, int64_t count, Address out) {
        std::vector<kt::WeightView> views;
        std::vector<int64_t> firsts;
        int64_t rows = 0;
        for (const auto& part : parts) {
          views.push_back(weight_at(part.first, type, part.second, cols));
          firsts.push_back(rows);
          rows += part.second;
        }
        for (int64_t i = 0; i < count; ++i)
          if (at<const int64_t>(ids)[i] < 0 || at<const int64_t>(ids)[i] >= rows)
            throw std::out_of_range("ids[" + std::to_string(i) + "] is " + std::to_string(at<const int64_t>(ids)[i]) +
                                    ", but the table has " + std::to_string(rows) + " rows");
        kt::gather_rows(pool, views, firsts, at<const int64_t>(ids), count, at<float>(out));
      },
      nb::arg("pool"), nb::arg("parts"), nb::arg("type"), nb::arg("cols"), nb::arg("ids"), nb::arg("count"),
      nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_bandwidth",
      [](kt::WorkerPool& pool, Address data, int64_t bytes, int repeats) {
        return kt::read_bandwidth(pool, at<const uint8_t>(data), bytes, repeats);
      },
      nb::arg("pool"), nb::arg("data"), nb::arg("bytes"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
  m.def("int8_peak", &kt::int8_peak, nb::arg("pool"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
  m.def("fp32_peak", &kt::fp32_peak, nb::arg("pool"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
  m.def("bf16_peak", &kt::bf16_peak, nb::arg("pool"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rms_norm",
      [](kt::WorkerPool& pool, Address x, Address weight, int64_t rows, int64_t cols, float eps, Address out) {
        kt::rms_norm(pool, at<const float>(x), at<const float>(weight), rows, cols, eps, at<float>(out));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("rows"), nb::arg("cols"), nb::arg("eps"),
      nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "activate",
      [](kt::WorkerPool& pool, int kind, float alpha, float limit, Address gate, Address up, int64_t count,
         Address out) {
        kt::activate(pool, act_spec(kind, alpha, limit, gate != 0), at<const float>(gate), at<const float>(up), count,
                     at<float>(out));
      },
      nb::arg("pool"), nb::arg("kind"), nb::arg("alpha"), nb::arg("limit"), nb::arg("gate"), nb::arg("up"),
      nb::arg("count"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_moe(nb::module_& m) {
  nb::class_<kt::Moe>(m, "Moe")
      .def(
          "__init__",
          [](kt::Moe* self, const ProjectionTuple& gate, const ProjectionTuple& up, const ProjectionTuple& down,
             int kind, float alpha, float limit, int layer, kt::ExpertStore* store, int64_t store_layer) {
            std::vector<const uint8_t*> pointers;
            kt::ExpertMatrices matrices;
            matrices.gate = projection(gate, pointers);
            matrices.up = projection(up, pointers);
            matrices.down = projection(down, pointers);
            const kt::ActSpec act = act_spec(kind, alpha, limit, matrices.gate.exists());
            new (self) kt::Moe(matrices, std::move(pointers), act, layer, store, store_layer);
          },
          nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("kind"), nb::arg("alpha"), nb::arg("limit"),
          nb::arg("layer"), nb::arg("store").none(), nb::arg("store_layer"), nb::keep_alive<1, 9>())
      .def(
          "forward",
          [](const kt::Moe& self, kt::WorkerPool& pool, Address x, int64_t tokens, Address ids, Address weights,
             int64_t top_k, Address out) {
            self.forward(pool, at<const float>(x), tokens, at<const int64_t>(ids), at<const float>(weights), top_k,
                         at<float>(out));
          },
          nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("ids"), nb::arg("weights"), nb::arg("top_k"),
          nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  nb::class_<kt::ExpertCounts>(m, "ExpertCounts")
      .def(nb::init<>())
      .def(
          "watch", [](kt::ExpertCounts& self, int64_t layer, const kt::Moe& moe) { self.watch(layer, moe.counts()); },
          nb::arg("layer"), nb::arg("moe"))
      .def(
          "add",
          [](kt::ExpertCounts& self, int64_t layer, const std::vector<int64_t>& rows, int64_t calls) {
            self.add(layer, rows.data(), static_cast<int64_t>(rows.size()), calls);
          },
          nb::arg("layer"), nb::arg("rows"), nb::arg("calls"))
      // rows, before: int64 [layers][experts]
      .def(
          "follow",
          [](kt::ExpertCounts& self, Address rows, Address before, int64_t layers, int64_t experts) {
            self.follow(at<const int64_t>(rows), at<int64_t>(before), layers, experts);
          },
          nb::arg("rows"), nb::arg("before"), nb::arg("layers"), nb::arg("experts"))
      // rows, calls, and distinct experts of each call, added up
      .def("totals",
           [](kt::ExpertCounts& self) {
             const kt::ExpertTotals sum = self.totals();
             return std::make_tuple(sum.num_rows, sum.num_calls, sum.num_touched);
           })
      // Each 8 bytes: layer and expert (u16), rows (u32).
      .def("take", [](kt::ExpertCounts& self) {
        const std::vector<kt::ExpertCount> news = self.take();
        return nb::bytes(news.data(), news.size() * sizeof(kt::ExpertCount));
      });
}

// addresses: hidden, ids, weights, out, num_tokens, word or 0; sizes: tokens at most, experts per token, hidden size;
// kinds: whether hidden is bf16, ids are int64, out is bf16.
kt::StreamBuffers stream_buffers(const std::vector<Address>& addresses, const std::vector<int64_t>& sizes,
                                 const std::vector<bool>& kinds) {
  if (addresses.size() != 6 || sizes.size() != 3 || kinds.size() != 3)
    throw std::invalid_argument("an ExpertStream wants 6 addresses, 3 sizes and 3 kinds");
  kt::StreamBuffers b;
  b.hidden = at<const void>(addresses[0]);
  b.ids = at<const void>(addresses[1]);
  b.weights = at<const float>(addresses[2]);
  b.out = at<void>(addresses[3]);
  b.num_tokens = at<const int32_t>(addresses[4]);
  b.word = at<uint32_t>(addresses[5]);
  b.max_tokens = sizes[0];
  b.top_k = sizes[1];
  b.hidden_size = sizes[2];
  b.hidden_is_bf16 = kinds[0];
  b.ids_are_int64 = kinds[1];
  b.out_is_bf16 = kinds[2];
  return b;
}

void bind_stream(nb::module_& m) {
  nb::class_<kt::ExpertStream>(m, "ExpertStream")
      .def(
          "__init__",
          [](kt::ExpertStream* self, kt::WorkerPool& pool, const std::vector<Address>& addresses,
             const std::vector<int64_t>& sizes, const std::vector<bool>& kinds) {
            new (self) kt::ExpertStream(pool, stream_buffers(addresses, sizes, kinds));
          },
          nb::arg("pool"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("kinds"), nb::keep_alive<1, 2>())
      .def("add_layer", &kt::ExpertStream::add_layer, nb::arg("moe"), nb::keep_alive<1, 2>())
      .def("word_of", &kt::ExpertStream::word_of, nb::arg("layer"), nb::arg("rows"), nb::arg("is_padded"))
      .def(
          "call_of",
          [](kt::ExpertStream& self, uint32_t word) { return reinterpret_cast<Address>(self.call_of(word)); },
          nb::arg("word"))
      .def_prop_ro_static("submit_address",
                          [](nb::handle) { return reinterpret_cast<Address>(&kt::ExpertStream::submit); })
      .def_prop_ro_static("wait_address", [](nb::handle) { return reinterpret_cast<Address>(&kt::ExpertStream::wait); })
      .def("expect", &kt::ExpertStream::expect, nb::arg("count"))
      .def("check", &kt::ExpertStream::check)
      .def("close", &kt::ExpertStream::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("has_error", &kt::ExpertStream::has_error)
      .def_prop_ro("failed_layer", &kt::ExpertStream::failed_layer)
      .def_prop_ro("num_forwards", &kt::ExpertStream::num_forwards)
      .def_prop_ro("busy_seconds", &kt::ExpertStream::busy_seconds);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of ktransformers. Use ktransformers.kernels.native, which checks what it passes here.";
  // Pools and layers may live in module globals until the interpreter exits; that is no leak worth a message.
  nb::set_leak_warnings(false);
  m.def("missing_isas", &kt::missing_tiers);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const kt::KernelTable* table : kt::available_tiers()) names.emplace_back(table->name);
    return names;
  });
  m.def("has_bf16", [](const std::string& isa) { return kt::tier_by_name(isa).bf16_tiles != nullptr; }, nb::arg("isa"));
  // The table of runtime/formats.h: number, name, elements and bytes of a block, form of activations, kernels, of a
  // packed tile columns and bytes of a part of its head and bytes of a block, where a block has fp16 numbers, and the
  // bytes in front of a row.
  m.def("formats", [] {
    nb::list formats;
    for (const kt::FormatInfo& info : kt::kFormats) {
      nb::list halves;
      for (const int at : {info.halves.first, info.halves.second})
        if (at >= 0) halves.append(at);
      formats.append(nb::make_tuple(static_cast<int>(info.type), info.name, info.block, info.bytes,
                                    static_cast<int>(info.form), static_cast<int>(info.kernels), info.head_cols,
                                    info.head_bytes, info.packed_bytes, nb::tuple(halves), info.row_head));
    }
    return formats;
  });
  // name -> (type number, elements in a block, bytes in a block) of weights in groups, which ggml does not have
  m.def("group_types", [] {
    nb::dict types;
    for (const kt::FormatInfo& info : kt::grouped_formats())
      types[info.name] = nb::make_tuple(static_cast<int>(info.type), info.block, info.bytes);
    return types;
  });
  m.def("activation_kinds", [] { return numbers_of(kt::kActivationNames); });
  m.def("scoring_kinds", [] { return numbers_of(kt::kScoringNames); });
  m.def("layouts", [] {
    nb::dict layouts;
    layouts["ROWS"] = static_cast<int>(kt::Layout::Rows);
    layouts["TILES"] = static_cast<int>(kt::Layout::Tiles);
    layouts["TILES_BF16"] = static_cast<int>(kt::Layout::TilesBf16);
    return layouts;
  });
  m.attr("MANY_TOKENS") = kt::kManyTokens;
  m.attr("BF16_COLS") = kt::kBf16Cols;
  m.attr("F8_E4M3") = static_cast<int>(kt::QType::F8_E4M3);
  m.attr("FP8_BLOCK") = kt::kFp8Block;
  m.attr("TILE_ROWS") = kt::kTileRows;
  m.attr("MAX_THREADS") = kt::kMaxThreads;
  m.def("num_allocations", &kt::num_allocations);
  bind_pool(m);
  bind_linear(m);
  bind_rows(m);
  bind_store(m);
  bind_moe(m);
  bind_stream(m);
  bind_attention(m);
  bind_kv(m);
  bind_index(m);
  bind_layer(m);
  bind_profile(m);
  bind_recurrent(m);
  bind_sampling(m);
}
