// Decoder layers for Python; see bind.cpp, of which this is a part.
#include "bind/bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <variant>

#include "bind/args.h"
#include "bind/recurrent.h"
#include "ops/attention/latent.h"
#include "ops/layer/layer.h"
#include "ops/layer/layer_stack.h"
#include "ops/layer/streams.h"

namespace nb = nanobind;

namespace {

using kt::Address;
using kt::at;

// (address, type, layout, rows, columns)
using WeightTuple = std::tuple<Address, int, int, int64_t, int64_t>;
// (address of the weight or 0, epsilon)
using NormTuple = std::tuple<Address, float>;

kt::WeightView weight_of(const WeightTuple& t) {
  return kt::weight_at(std::get<0>(t), std::get<1>(t), std::get<3>(t), std::get<4>(t), std::get<2>(t));
}
kt::NormSpec norm_of(const NormTuple& t) { return {at<const float>(std::get<0>(t)), std::get<1>(t)}; }

// (type, keys, values, their scales, slots, whether products are of bf16) or, of a delta net, (0, conv, states, 0, 0,
// slots, false)
using MemoryTuple = std::tuple<int, Address, Address, Address, Address, int64_t, bool>;
// cos, sin, slots, block table, sequences, lengths
using RowsTuple = std::tuple<Address, Address, Address, Address, Address, Address>;
// rows, rows and columns and stride of the block table, page size
using SizesTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

kt::LayerMemory memory_of(const MemoryTuple& t, bool has_states) {
  kt::LayerMemory memory{};
  memory.num_slots = std::get<5>(t);
  if (has_states) {
    memory.conv = at<float>(std::get<1>(t));
    memory.states = at<float>(std::get<2>(t));
    return memory;
  }
  memory.kv_type = kt::kv_type_of(std::get<0>(t));
  memory.keys = at<uint8_t>(std::get<1>(t));
  memory.values = at<uint8_t>(std::get<2>(t));
  memory.bf16_products = std::get<6>(t);
  memory.key_scales = at<float>(std::get<3>(t));
  memory.value_scales = at<float>(std::get<4>(t));
  return memory;
}

// Without a cache.
kt::AttentionStep attention_step(const RowsTuple& rows, const SizesTuple& sizes) {
  kt::AttentionStep step{};
  step.cos = at<const float>(std::get<0>(rows));
  step.sin = at<const float>(std::get<1>(rows));
  step.slots = at<const int64_t>(std::get<2>(rows));
  step.block_table = at<const int32_t>(std::get<3>(rows));
  step.seq_ids = at<const int32_t>(std::get<4>(rows));
  step.kv_lens = at<const int32_t>(std::get<5>(rows));
  std::tie(step.rows, step.num_seqs, step.max_pages, step.table_stride, step.page_size) = sizes;
  return step;
}

kt::AttentionStep attention_step(const RowsTuple& rows, const SizesTuple& sizes, const MemoryTuple& cache) {
  kt::AttentionStep step = attention_step(rows, sizes);
  kt::keep_in(step, memory_of(cache, false));
  return step;
}

using Mixer = std::variant<const kt::AttentionBlock*, const kt::LatentBlock*, const kt::DeltaNetBlock*>;
using FeedForward = std::variant<const kt::MoeBlock*, const kt::MlpBlock*>;

template <class T, class Variant> const T* one_of(const Variant& parts) {
  const auto* found = std::get_if<const T*>(&parts);
  return found == nullptr ? nullptr : *found;
}

// Layers with what they remember, which is bound to them before they run.
struct LayerStack {
  std::vector<kt::StackedLayer> layers;
  std::vector<kt::LayerMemory> memories;

  explicit LayerStack(const std::vector<std::pair<Mixer, FeedForward>>& parts) {
    for (const auto& [mixer, feed_forward] : parts)
      layers.push_back({one_of<kt::AttentionBlock>(mixer), one_of<kt::LatentBlock>(mixer),
                        one_of<kt::DeltaNetBlock>(mixer), one_of<kt::MoeBlock>(feed_forward),
                        one_of<kt::MlpBlock>(feed_forward)});
  }

  void bind(const std::vector<MemoryTuple>& tuples) {
    if (tuples.size() != layers.size()) throw std::invalid_argument("each layer needs a memory");
    memories.clear();
    for (const MemoryTuple& tuple : tuples)
      memories.push_back(memory_of(tuple, layers[memories.size()].delta_net != nullptr));
  }

  void forward(kt::WorkerPool& pool, kt::LayerBuffers& buffers, Address x, const RowsTuple& rows,
               const SizesTuple& sizes, const StepTuple& states) const {
    kt::layer_stack(pool, layers, memories, attention_step(rows, sizes), step_of(states), at<float>(x), buffers);
  }
};

void bind_router(nb::module_& m) {
  // By name alone: neighbours of one type could change places without an error.
  nb::class_<kt::RouterSpec>(m, "RouterSpec")
      .def(
          "__init__",
          [](kt::RouterSpec* self, int64_t top_k, int scoring, int64_t num_groups, int64_t topk_groups, bool is_top2,
             bool is_renormalized, float scaling) {
            kt::RouterSpec spec{};
            spec.top_k = top_k;
            spec.scoring = kt::kind_of<kt::Scoring>(scoring, kt::kScoringNames, "scoring");
            spec.num_groups = num_groups;
            spec.topk_groups = topk_groups;
            spec.is_top2 = is_top2;
            spec.is_renormalized = is_renormalized;
            spec.scaling = scaling;
            new (self) kt::RouterSpec(spec);
          },
          nb::kw_only(), nb::arg("top_k"), nb::arg("scoring"), nb::arg("num_groups"), nb::arg("topk_groups"),
          nb::arg("is_top2"), nb::arg("is_renormalized"), nb::arg("scaling"));
  m.def(
      "route",
      [](kt::WorkerPool& pool, const kt::RouterSpec& spec, Address logits, Address bias, int64_t tokens,
         int64_t experts, Address ids, Address weights) {
        kt::route(pool, spec, at<const float>(logits), at<const float>(bias), tokens, experts, at<int64_t>(ids),
                  at<float>(weights));
      },
      nb::arg("pool"), nb::arg("spec"), nb::arg("logits"), nb::arg("bias"), nb::arg("tokens"), nb::arg("experts"),
      nb::arg("ids"), nb::arg("weights"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_streams(nb::module_& m) {
  m.attr("MAX_STREAMS") = kt::kMaxStreams;
  // weights: fn, base, scale; sizes: rows, N, H, shares, iterations; eps: of weights, of the norm; written: products,
  // post, comb, out
  m.def(
      "collapse_streams",
      [](kt::WorkerPool& pool, Address x, const std::tuple<Address, Address, Address>& weights,
         const std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>& sizes, const std::tuple<float, float>& eps,
         const std::tuple<Address, Address, Address, Address>& written) {
        const auto [rows, streams, hidden, shares, iterations] = sizes;
        const auto [fn, base, scale] = weights;
        const auto [products, post, comb, out] = written;
        const kt::HyperSpec spec{streams, hidden, shares, iterations, std::get<0>(eps), std::get<1>(eps)};
        kt::collapse_streams(pool, spec, {at<const float>(fn), at<const float>(base), at<const float>(scale)},
                             at<const float>(x), rows, at<float>(products), at<float>(post), at<float>(comb),
                             at<float>(out));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("weights"), nb::arg("sizes"), nb::arg("eps"), nb::arg("written"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "mix_streams",
      [](kt::WorkerPool& pool, Address x, int64_t rows, int64_t streams, int64_t hidden, Address y, Address post,
         Address comb) {
        kt::mix_streams(pool, streams, hidden, at<const float>(y), at<const float>(post), at<const float>(comb), rows,
                        at<float>(x));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("rows"), nb::arg("streams"), nb::arg("hidden"), nb::arg("y"),
      nb::arg("post"), nb::arg("comb"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "norm_streams",
      [](kt::WorkerPool& pool, Address x, Address weight, int64_t rows, int64_t streams, int64_t hidden, float eps,
         Address out) {
        kt::norm_streams(pool, at<const float>(x), at<const float>(weight), rows, streams, hidden, eps, at<float>(out));
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("rows"), nb::arg("streams"), nb::arg("hidden"),
      nb::arg("eps"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gate_streams",
      [](kt::WorkerPool& pool, Address normed, int64_t rows, int64_t streams, int64_t hidden, Address gates,
         Address out) {
        kt::gate_streams(pool, at<const float>(normed), rows, streams, hidden, at<float>(gates), at<float>(out));
      },
      nb::arg("pool"), nb::arg("normed"), nb::arg("rows"), nb::arg("streams"), nb::arg("hidden"), nb::arg("gates"),
      nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<kt::LayerBuffers>(m, "LayerBuffers").def(nb::init<>());
  bind_router(m);
  bind_streams(m);
  // norms: input, query, key; weights: q, k, v, o, and their biases; sizes: heads, KV heads, head dim, rotary dims,
  // window
  nb::class_<kt::AttentionBlock>(m, "AttentionBlock")
      .def(
          "__init__",
          [](kt::AttentionBlock* self, const std::vector<NormTuple>& norms, const std::vector<WeightTuple>& weights,
             const std::vector<Address>& biases, const std::vector<int64_t>& sizes, float scale, bool has_gate,
             int layer) {
            if (norms.size() != 3 || weights.size() != 4 || biases.size() != 4 || sizes.size() != 5)
              throw std::invalid_argument("AttentionBlock wants 3 norms, 4 weights, 4 biases and 5 sizes");
            new (self) kt::AttentionBlock{norm_of(norms[0]),
                                          norm_of(norms[1]),
                                          norm_of(norms[2]),
                                          weight_of(weights[0]),
                                          weight_of(weights[1]),
                                          weight_of(weights[2]),
                                          weight_of(weights[3]),
                                          at<const float>(biases[0]),
                                          at<const float>(biases[1]),
                                          at<const float>(biases[2]),
                                          at<const float>(biases[3]),
                                          sizes[0],
                                          sizes[1],
                                          sizes[2],
                                          sizes[3],
                                          scale,
                                          sizes[4],
                                          has_gate,
                                          layer};
          },
          nb::arg("norms"), nb::arg("weights"), nb::arg("biases"), nb::arg("sizes"), nb::arg("scale"),
          nb::arg("has_gate"), nb::arg("layer"))
      .def(
          "forward",
          [](const kt::AttentionBlock& self, kt::WorkerPool& pool, kt::LayerBuffers& buffers, Address x,
             const RowsTuple& rows, const SizesTuple& sizes, const MemoryTuple& cache) {
            kt::attention_block(pool, self, attention_step(rows, sizes, cache), at<float>(x), buffers);
          },
          nb::arg("pool"), nb::arg("buffers"), nb::arg("x"), nb::arg("rows"), nb::arg("sizes"), nb::arg("cache"),
          nb::call_guard<nb::gil_scoped_release>());
  // norms: input, of the compressed query, of the latent, of the shared key; weights: q, kv_a, o, k_b, v_b, and q_a
  // where queries are compressed; biases: of q, kv_a, o, q_a; sizes: heads, rank, dimensions of a query without and
  // with rotation, of a value
  nb::class_<kt::LatentBlock>(m, "LatentBlock")
      .def(
          "__init__",
          [](kt::LatentBlock* self, const std::vector<NormTuple>& norms, const std::vector<WeightTuple>& weights,
             const std::vector<Address>& biases, const std::vector<int64_t>& sizes, float scale, float latent_scale,
             bool is_interleaved, int layer) {
            if (norms.size() != 4 || (weights.size() != 5 && weights.size() != 6) || biases.size() != 4 ||
                sizes.size() != 5)
              throw std::invalid_argument("LatentBlock wants 4 norms, 5 or 6 weights, 4 biases and 5 sizes");
            kt::LatentBlock block{};
            block.input = norm_of(norms[0]);
            block.query = norm_of(norms[1]);
            block.latent = norm_of(norms[2]);
            block.shared = norm_of(norms[3]);
            block.q = weight_of(weights[0]);
            block.kv_a = weight_of(weights[1]);
            block.o = weight_of(weights[2]);
            block.k_b = weight_of(weights[3]);
            block.v_b = weight_of(weights[4]);
            block.has_compression = weights.size() == 6;
            if (block.has_compression) block.q_a = weight_of(weights[5]);
            block.q_bias = at<const float>(biases[0]);
            block.kv_a_bias = at<const float>(biases[1]);
            block.o_bias = at<const float>(biases[2]);
            block.q_a_bias = at<const float>(biases[3]);
            block.num_heads = sizes[0];
            block.rank = sizes[1];
            block.nope = sizes[2];
            block.rope = sizes[3];
            block.v_dim = sizes[4];
            block.scale = scale;
            block.latent_scale = latent_scale;
            block.is_interleaved = is_interleaved;
            block.layer = layer;
            new (self) kt::LatentBlock(block);
          },
          nb::arg("norms"), nb::arg("weights"), nb::arg("biases"), nb::arg("sizes"), nb::arg("scale"),
          nb::arg("latent_scale"), nb::arg("is_interleaved"), nb::arg("layer"))
      .def(
          "forward",
          [](const kt::LatentBlock& self, kt::WorkerPool& pool, kt::LayerBuffers& buffers, Address x,
             const RowsTuple& rows, const SizesTuple& sizes, const MemoryTuple& cache) {
            kt::latent_block(pool, self, attention_step(rows, sizes, cache), at<float>(x), buffers);
          },
          nb::arg("pool"), nb::arg("buffers"), nb::arg("x"), nb::arg("rows"), nb::arg("sizes"), nb::arg("cache"),
          nb::call_guard<nb::gil_scoped_release>());
  // norms: input, of a head's result; weights: qkvz, ba, o, or qkv, z, b, a, o; addresses: conv, rate, bias; sizes: key
  // heads, heads, K, V, width; gate: kind of activation
  nb::class_<kt::DeltaNetBlock>(m, "DeltaNetBlock")
      .def(
          "__init__",
          [](kt::DeltaNetBlock* self, const std::vector<NormTuple>& norms, const std::vector<WeightTuple>& weights,
             const std::vector<Address>& addresses, const std::vector<int64_t>& sizes, float l2norm_eps, int gate,
             bool is_tiled, int layer) {
            const bool is_interleaved = weights.size() == 3;
            if (norms.size() != 2 || (!is_interleaved && weights.size() != 5) || addresses.size() != 3 ||
                sizes.size() != 5)
              throw std::invalid_argument("DeltaNetBlock wants 2 norms, 3 or 5 weights, 3 addresses and 5 sizes");
            kt::DeltaNetBlock block{};
            block.input = norm_of(norms[0]);
            block.norm = norm_of(norms[1]);
            block.is_interleaved = is_interleaved;
            block.is_tiled = is_tiled;
            block.qkv = weight_of(weights[0]);
            block.z = weight_of(weights[is_interleaved ? 0 : 1]);
            block.b = weight_of(weights[is_interleaved ? 1 : 2]);
            block.a = weight_of(weights[is_interleaved ? 1 : 3]);
            block.o = weight_of(weights.back());
            block.conv = at<const float>(addresses[0]);
            block.rate = at<const float>(addresses[1]);
            block.bias = at<const float>(addresses[2]);
            block.key_heads = sizes[0];
            block.heads = sizes[1];
            block.dim_k = sizes[2];
            block.dim_v = sizes[3];
            block.width = static_cast<int>(sizes[4]);
            block.gate = kt::act_spec(gate, 0, 0, false).kind;
            block.l2norm_eps = l2norm_eps;
            block.layer = layer;
            new (self) kt::DeltaNetBlock(block);
          },
          nb::arg("norms"), nb::arg("weights"), nb::arg("addresses"), nb::arg("sizes"), nb::arg("l2norm_eps"),
          nb::arg("gate"), nb::arg("is_tiled"), nb::arg("layer"))
      .def(
          "forward",
          [](const kt::DeltaNetBlock& self, kt::WorkerPool& pool, kt::LayerBuffers& buffers, const StepTuple& step,
             Address x, Address conv, Address states) {
            kt::delta_net_block(pool, self, step_of(step), at<float>(conv), at<float>(states), at<float>(x), buffers);
          },
          nb::arg("pool"), nb::arg("buffers"), nb::arg("step"), nb::arg("x"), nb::arg("conv"), nb::arg("states"),
          nb::call_guard<nb::gil_scoped_release>());
  // shared: gate, up, down of the shared experts, or none; then what they are scored by, or none
  nb::class_<kt::MoeBlock>(m, "MoeBlock")
      .def(
          "__init__",
          [](kt::MoeBlock* self, const NormTuple& norm, const WeightTuple& router, Address bias,
             const kt::RouterSpec& spec, const kt::Moe& experts, const std::vector<WeightTuple>& shared, int kind,
             float alpha, float limit, int layer) {
            if (!shared.empty() && shared.size() != 3 && shared.size() != 4)
              throw std::invalid_argument("shared experts have 3 weights, or 4 with a score");
            kt::MoeBlock block{norm_of(norm), weight_of(router), at<const float>(bias), spec, &experts, {}, layer};
            if (!shared.empty())
              block.shared = {true,
                              weight_of(shared[0]),
                              weight_of(shared[1]),
                              weight_of(shared[2]),
                              kt::act_spec(kind, alpha, limit),
                              shared.size() == 4,
                              {}};
            if (shared.size() == 4) block.shared.score = weight_of(shared[3]);
            new (self) kt::MoeBlock(block);
          },
          nb::arg("norm"), nb::arg("router"), nb::arg("bias"), nb::arg("spec"), nb::arg("experts"), nb::arg("shared"),
          nb::arg("kind"), nb::arg("alpha"), nb::arg("limit"), nb::arg("layer"), nb::keep_alive<1, 6>())
      .def(
          "forward",
          [](const kt::MoeBlock& self, kt::WorkerPool& pool, kt::LayerBuffers& buffers, int64_t rows, Address x,
             Address ids) { kt::moe_block(pool, self, rows, at<float>(x), at<int64_t>(ids), buffers); },
          nb::arg("pool"), nb::arg("buffers"), nb::arg("rows"), nb::arg("x"), nb::arg("ids"),
          nb::call_guard<nb::gil_scoped_release>());
  nb::class_<kt::MlpBlock>(m, "MlpBlock")
      .def(
          "__init__",
          [](kt::MlpBlock* self, const NormTuple& norm, const WeightTuple& gate, const WeightTuple& up,
             const WeightTuple& down, int kind, float alpha, float limit, int layer) {
            new (self) kt::MlpBlock{
                norm_of(norm), weight_of(gate), weight_of(up), weight_of(down), kt::act_spec(kind, alpha, limit),
                layer};
          },
          nb::arg("norm"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("kind"), nb::arg("alpha"),
          nb::arg("limit"), nb::arg("layer"))
      .def(
          "forward",
          [](const kt::MlpBlock& self, kt::WorkerPool& pool, kt::LayerBuffers& buffers, int64_t rows, Address x) {
            kt::mlp_block(pool, self, rows, at<float>(x), buffers);
          },
          nb::arg("pool"), nb::arg("buffers"), nb::arg("rows"), nb::arg("x"), nb::call_guard<nb::gil_scoped_release>());
  // layers: (AttentionBlock or DeltaNetBlock, MoeBlock or MlpBlock) of each, which the caller keeps alive
  nb::class_<LayerStack>(m, "LayerStack")
      .def(nb::init<const std::vector<std::pair<Mixer, FeedForward>>&>(), nb::arg("layers"))
      .def("bind", &LayerStack::bind, nb::arg("memories"))
      // states: the step of recurrent layers, zeros where there are none
      .def("forward", &LayerStack::forward, nb::arg("pool"), nb::arg("buffers"), nb::arg("x"), nb::arg("rows"),
           nb::arg("sizes"), nb::arg("states"), nb::call_guard<nb::gil_scoped_release>());
}
