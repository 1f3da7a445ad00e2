// One call of a layer's routed experts for one chunk of tokens.
//
// A pair (token, k) keeps its own row of scratch from gate to down, so an output never depends on which tokens share
// its expert, nor on which experts are computed together: those of a store come in waves, as their weights come, and
// the weighted sum is made when all rows are there, in the order of k.
//
// Few tokens take one job, in which a thread goes on with tiles of down as soon as there is nothing of up and gate
// left:
//
//   tiles of up and gate ──> who finishes the last of an expert quantizes its rows
//   tiles of down ─────────> wait for these, and ask for their weights meanwhile
//                        ──> who finishes the last of some columns combines them
//
// Many take a job for each of these, between which rows are laid out as their kernels want them.
#pragma once
#include "ops/experts/pairs.h"
#include "ops/linear/activations.h"
#include "ops/linear/tiles.h"
#include "ops/weights/weights.h"

namespace kt {

constexpr int64_t kMaxTopK = 256;

// One projection of all experts: pointers to what holds their matrices, and an optional bias [experts][rows].
struct ExpertProjection {
  QType type = QType::F32;
  int64_t rows = 0, cols = 0;
  const float* bias = nullptr;
  Layout layout = Layout::Rows;
  int64_t offset = 0;                       // of the matrix behind each pointer
  const uint8_t* const* experts = nullptr;  // of those that are computed now; the others' are not read

  bool exists() const { return rows > 0; }
  bool is_packed() const { return layout != Layout::Rows; }
  WeightView view(int64_t expert) const { return make_view(type, experts[expert] + offset, rows, cols, layout); }
  int64_t nbytes() const { return exists() ? weight_bytes(make_view(type, nullptr, rows, cols, layout)) : 0; }
};

// gate may not exist.
struct ExpertMatrices { ExpertProjection gate, up, down; };

class Countdown;

class MoeRun {
 public:
  // What the call makes of the rows of its pairs.
  struct Combining {
    int64_t tokens, top_k;
    const float* weights;
    float* out;
  };

  // x: [tokens, hidden]. sorted: of all pairs of the chunk, which outlives the run as `matrices` and `act` do.
  MoeRun(WorkerPool::Session& session, const ExpertMatrices& matrices, const ActSpec& act, const SortedPairs& sorted,
         const float* x, const Combining& combining);

  // All of it.
  void run();
  // The rows of some experts' pairs; then, once all experts had theirs, the result.
  void run_wave(Span<SortedPairs::Group> groups);
  void combine_all();

 private:
  // What a projection reads: rows of the call, some for each token, and the same by chunks where kernels want that.
  struct Input {
    bool is_bf16 = false;
    int planes = 1;
    ActRows rows;
    Span<TokenBlocks> blocks;

    void point(TileArgs& args, int64_t chunk) const {
      if (!blocks.empty()) args.blocks = &blocks[chunk];
    }
  };

  void compute();
  int64_t touched_bytes(const ExpertProjection& p) const { return wave_.groups.count * p.nbytes(); }
  int64_t pairs() const { return sorted_.token.count; }
  bool run_until_down();
  bool wants_blocks() const;
  Input input_of(const ExpertProjection& p);
  void up_tiles(const PairChunk& c, int64_t chunk, int64_t tile, int count, float (*acc)[kPairChunk * kTileRows]) const;
  TileArgs input_args(const ExpertProjection& p, const Input& input, const PairChunk& c, int64_t chunk, int64_t tile,
                      float* acc) const;
  void run_up_task(const TileTasks::Task& task, const PairChunk& c) const;
  void run_up();
  void run_both();
  bool await_rows(const TileTasks::Task& task, const Countdown& left) const;
  void point_down();
  void take_down_rows();
  Span<int32_t> wave_pairs();
  void run_up_bf16();
  void run_up_fused();
  TileTasks down_tasks();
  void run_down();
  void run_down_task(const TileTasks::Task& task, const Countdown& left) const;
  void combine(int64_t t, int64_t first, int64_t cols) const;
  float* intermediate();
  const QuantizedRows& inner_rows();

  WorkerPool::Session& session_;
  const KernelTable& kernels_;
  const ExpertProjection &gate_, &up_, &down_;
  const ActSpec& act_;
  const SortedPairs& sorted_;  // of the call
  SortedPairs wave_;           // of the experts that are computed now
  const Combining combining_;
  const bool has_gate_, is_grouped_, is_many_;
  bool is_merged_ = false, is_streamed_ = false;
  Activations inputs_;
  Input up_input_, gate_input_, down_input_;
  // Of all pairs, and of each the wave's rows.
  float *intermediate_ = nullptr, *outputs_ = nullptr;
  QuantizedRows inner_ = {};
};

}  // namespace kt
