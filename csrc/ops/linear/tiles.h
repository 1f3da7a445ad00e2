// Tiles of 16 rows of weights: which of them a task computes, and the kernel for a few of them at once.
#pragma once
#include <cstdint>

#include "runtime/pool.h"

namespace kt {

// Runs the kernel for the layout and the activations that each of `count` tiles points at; tokens are the same for all.
void run_tiles(const KernelTable& kernels, const TileArgs* args, int count);

constexpr int kTileGroup = 4;          // tiles that one task computes when there are enough tokens to share
constexpr int64_t kGroupedTokens = 8;  // from here on

// Tiles of `tile_bytes` that a task computes of few tokens: as many as pay for handing it out, while threads have tasks
// to share. Of bf16 two at least: the sums of one would wait for one another.
int64_t few_tiles(int64_t tile_bytes, bool is_bf16, int64_t num_tiles, int num_threads);

// Groups of tiles of 16 rows for every chunk of tokens. Tiles are spread over the nodes of the machine in order, as
// `pack` lays them out; tasks of one node are neighbours.
struct TileTasks {
  struct Task {
    int64_t chunk, tile;
    int count;
  };
  TileTasks(int64_t num_tiles, int64_t group_size, int64_t chunks, int num_nodes);
  Task at(int64_t i) const;
  int64_t first_tile(int node) const { return tiles * node / nodes; }

  int64_t tiles, group;
  int nodes;
  NodeEnds ends;
};

}  // namespace kt
