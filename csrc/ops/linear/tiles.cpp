// See tiles.h.
#include "ops/linear/tiles.h"

#include <algorithm>

#include "runtime/format_info.h"

namespace kt {
namespace {

// Tiles that one call of a kernel may take together have the same.
int kind_of(const TileArgs& args) {
  if (args.packed == nullptr) return 0;
  return args.blocks != nullptr && args.blocks->bf16 != nullptr ? 1 : 2 + static_cast<int>(format_info(args.type).form);
}

}  // namespace

void run_tiles(const KernelTable& kernels, const TileArgs* args, int count) {
  for (int i = 0; i < count;) {
    const int kind = kind_of(args[i]);
    int same = 1;
    while (kind != 0 && i + same < count && kind_of(args[i + same]) == kind) ++same;
    if (kind == 0)
      kernels.tile(args[i]);
    else
      (kind == 1 ? kernels.bf16_tiles : kernels.packed_tiles)(args + i, same);
    i += same;
  }
}

int64_t few_tiles(int64_t tile_bytes, bool is_bf16, int64_t num_tiles, int num_threads) {
  constexpr int64_t kTaskBytes = 24 << 10, kTasksOfThread = 8;
  if (tile_bytes == 0) return 1;  // rows in block layout
  const int64_t enough = std::max<int64_t>(kTaskBytes / tile_bytes, is_bf16 ? 2 : 1);
  return std::max<int64_t>(1, std::min({enough, int64_t{kTileGroup}, num_tiles / (kTasksOfThread * num_threads)}));
}

TileTasks::TileTasks(int64_t num_tiles, int64_t group_size, int64_t chunks, int num_nodes)
    : tiles(num_tiles), group(group_size), nodes(num_nodes) {
  ends.count = nodes;
  int64_t end = 0;
  for (int n = 0; n < nodes; ++n) {
    end += chunks * ((first_tile(n + 1) - first_tile(n) + group - 1) / group);
    ends.ends[static_cast<size_t>(n)] = end;
  }
}

TileTasks::Task TileTasks::at(int64_t i) const {
  int node = 0;
  while (i >= ends.ends[static_cast<size_t>(node)]) ++node;
  if (node > 0) i -= ends.ends[static_cast<size_t>(node) - 1];
  const int64_t first = first_tile(node), end = first_tile(node + 1), per_chunk = (end - first + group - 1) / group;
  const int64_t tile = first + i % per_chunk * group;
  return {i / per_chunk, tile, static_cast<int>(std::min(group, end - tile))};
}

}  // namespace kt
