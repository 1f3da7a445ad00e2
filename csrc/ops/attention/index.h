// Which positions of its sequence a row attends to, where an indexer chooses them.
#pragma once
#include "runtime/pool.h"

namespace kt {

// Of each choice (a row; a row and a head where heads choose apart) the best blocks of `block` positions: those with
// the greatest score of a position, the lower block where scores are equal; the last `local` blocks always.
struct IndexChoice {
  int64_t num_blocks;  // most that are chosen
  int64_t block, local;
  int32_t* slots;   // [choices][num_blocks * block]: slots of the chosen positions, in ascending order of positions
  int32_t* counts;  // [choices]: how many
};

// Throws std::invalid_argument for a page outside of the table or the cache, and for more than kMaxIndexHeads heads.
void choose_positions(WorkerPool& pool, const IndexArgs& args, const IndexChoice& choice);

}  // namespace kt
