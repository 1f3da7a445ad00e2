// Attention over a paged cache.
#pragma once
#include "runtime/pool.h"

namespace kt {

// Throws std::invalid_argument for a page outside of the table or the cache.
void attention(WorkerPool& pool, const AttentionArgs& args);

// Throws std::invalid_argument unless every page that a row sees is in the table and lies inside the cache.
void check_pages(const AttentionArgs& args);

}  // namespace kt
