// Attention, the cache that it reads and the choice of positions for Python; see bind.cpp, of which this is a part.
#include "bind/bind.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <tuple>

#include "bind/args.h"
#include "ops/attention/attention.h"
#include "ops/attention/index.h"
#include "ops/attention/kv.h"

namespace nb = nanobind;

using kt::Address;
using kt::at;

// sizes: rows, heads, kv heads, dim_k, dim_v, slots of the cache; strides: q row, q head, k slot, k head, v slot, v
// head, all in elements; table: rows, columns, stride of the block table, page size.
// Scales of keys (address, strides of slots and heads, how many a head has) and of values (address, strides).
using ScalesTuple = std::tuple<Address, int64_t, int64_t, int, Address, int64_t, int64_t>;

void bind_attention(nb::module_& m) {
  m.attr("MAX_BF16_DIMS") = kt::kMaxBf16Dims;
  m.def(
      "attention",
      [](kt::WorkerPool& pool, Address q, int kv_type, Address k, Address v, const ScalesTuple& scales, Address out,
         const std::array<int64_t, 6>& sizes, const std::array<int64_t, 6>& strides, Address block_table,
         const std::array<int64_t, 4>& table, Address seq_ids, Address kv_lens, float scale, float softcap,
         int64_t window, bool is_chunked, Address sinks, bool bf16_products) {
        kt::AttentionArgs a{};
        a.q = at<const float>(q);
        a.kv_type = kt::kv_type_of(kv_type);
        a.k = at<const uint8_t>(k);
        a.v = at<const uint8_t>(v);
        a.k_scales = at<const float>(std::get<0>(scales));
        a.k_scale_slot = std::get<1>(scales);
        a.k_scale_head = std::get<2>(scales);
        a.k_parts = std::get<3>(scales);
        a.v_scales = at<const float>(std::get<4>(scales));
        a.v_scale_slot = std::get<5>(scales);
        a.v_scale_head = std::get<6>(scales);
        a.out = at<float>(out);
        a.num_rows = sizes[0];
        a.num_heads = static_cast<int>(sizes[1]);
        a.num_kv_heads = static_cast<int>(sizes[2]);
        a.dim_k = static_cast<int>(sizes[3]);
        a.dim_v = static_cast<int>(sizes[4]);
        a.q_row = strides[0];
        a.q_head = strides[1];
        a.k_slot = strides[2];
        a.k_head = strides[3];
        a.v_slot = strides[4];
        a.v_head = strides[5];
        a.block_table = at<const int32_t>(block_table);
        a.num_slots = sizes[5];
        a.num_seqs = table[0];
        a.max_pages = table[1];
        a.table_stride = table[2];
        a.page_size = table[3];
        a.seq_ids = at<const int32_t>(seq_ids);
        a.kv_lens = at<const int32_t>(kv_lens);
        a.scale = scale;
        a.softcap = softcap;
        a.window = window;
        a.is_chunked = is_chunked;
        a.bf16_products = bf16_products;
        a.sinks = at<const float>(sinks);
        kt::attention(pool, a);
      },
      nb::arg("pool"), nb::arg("q"), nb::arg("kv_type"), nb::arg("k"), nb::arg("v"), nb::arg("scales"), nb::arg("out"),
      nb::arg("sizes"), nb::arg("strides"), nb::arg("block_table"), nb::arg("table"), nb::arg("seq_ids"),
      nb::arg("kv_lens"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("is_chunked"),
      nb::arg("sinks"), nb::arg("bf16_products"), nb::call_guard<nb::gil_scoped_release>());
}

// x: [rows, heads, dim]; sizes: rows, heads, dim, slots, dimensions with the first of two scales; strides: of x rows
// and heads, of the cache slots and heads, of the scales slots and heads.
void bind_kv(nb::module_& m) {
  m.def("kv_types", [] {
    nb::dict types;
    types["F32"] = static_cast<int>(kt::KvType::F32);
    types["BF16"] = static_cast<int>(kt::KvType::BF16);
    types["I8"] = static_cast<int>(kt::KvType::I8);
    types["F8"] = static_cast<int>(kt::KvType::F8);
    return types;
  });
  m.def(
      "write_kv",
      [](kt::WorkerPool& pool, int kv_type, Address x, Address slots, Address cache, Address scales,
         const std::array<int64_t, 5>& sizes, const std::array<int64_t, 6>& strides) {
        const kt::KvTarget to = {kt::kv_type_of(kv_type),
                                 at<uint8_t>(cache),
                                 strides[2],
                                 strides[3],
                                 at<float>(scales),
                                 strides[4],
                                 strides[5],
                                 sizes[3],
                                 sizes[2],
                                 sizes[4]};
        kt::write_kv(pool, to, at<const float>(x), strides[0], strides[1], sizes[0], sizes[1],
                     at<const int64_t>(slots));
      },
      nb::arg("pool"), nb::arg("kv_type"), nb::arg("x"), nb::arg("slots"), nb::arg("cache"), nb::arg("scales"),
      nb::arg("sizes"), nb::arg("strides"), nb::call_guard<nb::gil_scoped_release>());
}

// sizes: rows, heads, dimension, slots of the cache, stride of a slot in elements; table: as `attention`; choice:
// blocks that are chosen, positions of a block, blocks at the end that always are.
void bind_index(nb::module_& m) {
  m.attr("MAX_INDEX_HEADS") = kt::kMaxIndexHeads;
  m.def(
      "choose_positions",
      [](kt::WorkerPool& pool, Address q, Address weights, Address k, const std::array<int64_t, 5>& sizes,
         Address block_table, const std::array<int64_t, 4>& table, Address seq_ids, Address kv_lens, float scale,
         const std::array<int64_t, 3>& choice, Address slots, Address counts) {
        kt::IndexArgs a{};
        a.q = at<const float>(q);
        a.weights = at<const float>(weights);
        a.k = at<const float>(k);
        a.num_rows = sizes[0];
        a.num_heads = static_cast<int>(sizes[1]);
        a.dim = static_cast<int>(sizes[2]);
        a.num_slots = sizes[3];
        a.k_slot = sizes[4];
        a.block_table = at<const int32_t>(block_table);
        a.num_seqs = table[0];
        a.max_pages = table[1];
        a.table_stride = table[2];
        a.page_size = table[3];
        a.seq_ids = at<const int32_t>(seq_ids);
        a.kv_lens = at<const int32_t>(kv_lens);
        a.scale = scale;
        kt::choose_positions(pool, a, {choice[0], choice[1], choice[2], at<int32_t>(slots), at<int32_t>(counts)});
      },
      nb::arg("pool"), nb::arg("q"), nb::arg("weights"), nb::arg("k"), nb::arg("sizes"), nb::arg("block_table"),
      nb::arg("table"), nb::arg("seq_ids"), nb::arg("kv_lens"), nb::arg("scale"), nb::arg("choice"), nb::arg("slots"),
      nb::arg("counts"), nb::call_guard<nb::gil_scoped_release>());
}
