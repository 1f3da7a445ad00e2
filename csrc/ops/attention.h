// Attention over a paged cache.
#pragma once
#include "runtime/pool.h"

namespace kt {

// Throws std::invalid_argument for a page outside of the table or the cache.
void attention(WorkerPool& pool, const AttentionArgs& args);

}  // namespace kt
