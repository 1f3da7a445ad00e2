// The Python face of sampling.h; see bind.cpp.
#include "bind/bind.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>

#include "bind/args.h"
#include "ops/sampling/philox.h"
#include "ops/sampling/sampling.h"

namespace nb = nanobind;

using kt::Address;
using kt::at;

namespace {

// temperature, top_p, min_p and the uniform number
using Settings = std::array<double, 4>;

kt::SampleRow sample_row(const float* raw, const float* adjusted, const Settings& settings, int64_t top_k,
                         const uint32_t* allowed) {
  const auto& [temperature, top_p, min_p, uniform] = settings;
  return {raw, adjusted, temperature, top_p, min_p, uniform, top_k, allowed};
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def(
      "philox4x32",
      [](std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
        uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]}, keys[2] = {key[0], key[1]};
        kt::philox4x32(words, keys);
        return std::array<uint32_t, 4>{words[0], words[1], words[2], words[3]};
      },
      nb::arg("counter"), nb::arg("key"));
  m.def("uniform_at", &kt::uniform_at, nb::arg("seed"), nb::arg("position"));
  // Of each row: the addresses of its raw and its adjusted logits and of its allowed tokens (0: all), then its
  // settings.
  m.def(
      "sample_rows",
      [](kt::WorkerPool& pool, const std::vector<std::array<Address, 3>>& logits, const std::vector<Settings>& settings,
         const std::vector<int64_t>& top_k, int64_t vocab) {
        if (logits.size() != settings.size() || logits.size() != top_k.size())
          throw std::invalid_argument("rows and settings differ in number");
        std::vector<kt::SampleRow> rows;
        for (size_t i = 0; i < logits.size(); ++i)
          rows.push_back(sample_row(at<const float>(logits[i][0]), at<const float>(logits[i][1]), settings[i], top_k[i],
                                    at<const uint32_t>(logits[i][2])));
        std::vector<kt::SamplePick> picks;
        {
          const nb::gil_scoped_release released;
          picks = kt::sample_rows(pool, rows, vocab);
        }
        std::vector<std::pair<int64_t, int64_t>> out;
        for (const kt::SamplePick& pick : picks) out.emplace_back(pick.token, pick.bad);
        return out;
      },
      nb::arg("pool"), nb::arg("logits"), nb::arg("settings"), nb::arg("top_k"), nb::arg("vocab"));
  // Of each row: the addresses of its candidates' ids and of their logits, and how many; settings as above.
  m.def(
      "sample_candidates",
      [](kt::WorkerPool& pool, const std::vector<std::tuple<Address, Address, int64_t>>& candidates,
         const std::vector<Settings>& settings, const std::vector<int64_t>& top_k, int64_t vocab) {
        if (candidates.size() != settings.size() || candidates.size() != top_k.size())
          throw std::invalid_argument("rows and settings differ in number");
        std::vector<kt::CandidateRow> rows;
        for (size_t i = 0; i < candidates.size(); ++i) {
          const auto& [ids, logits, count] = candidates[i];
          const bool is_cut = top_k[i] > 0 && top_k[i] < vocab;
          if (count < 1 || count > vocab || count < (is_cut ? top_k[i] : vocab))
            throw std::invalid_argument("a row has fewer candidates than its top_k, or more than there are tokens");
          const float* row = at<const float>(logits);
          rows.push_back({sample_row(row, row, settings[i], top_k[i], nullptr), at<const int32_t>(ids), count});
        }
        const nb::gil_scoped_release released;
        return kt::sample_candidates(pool, rows, vocab);
      },
      nb::arg("pool"), nb::arg("candidates"), nb::arg("settings"), nb::arg("top_k"), nb::arg("vocab"));
  m.def(
      "token_logprobs",
      [](kt::WorkerPool& pool, Address logits, int64_t rows, int64_t vocab, Address ids, int64_t count, Address out,
         Address top_ids, Address top) {
        kt::token_logprobs(pool, at<const float>(logits), rows, vocab, at<const int64_t>(ids), count, at<float>(out),
                           at<int64_t>(top_ids), at<float>(top));
      },
      nb::arg("pool"), nb::arg("logits"), nb::arg("rows"), nb::arg("vocab"), nb::arg("ids"), nb::arg("count"),
      nb::arg("out"), nb::arg("top_ids"), nb::arg("top"), nb::call_guard<nb::gil_scoped_release>());
  // For tests.
  m.def(
      "_row_weights",
      [](kt::WorkerPool& pool, Address logits, int64_t vocab, double temperature, Address out) {
        kt::row_weights(pool, at<const float>(logits), vocab, temperature, at<double>(out));
      },
      nb::arg("pool"), nb::arg("logits"), nb::arg("vocab"), nb::arg("temperature"), nb::arg("out"));
}
