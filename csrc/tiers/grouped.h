// The types of weights in groups (runtime/grouped.h), by name.
#pragma once
#include <vector>

#include "runtime/types.h"

namespace kt {

// The type with a number from 2048 on; throws std::invalid_argument for one that there is not.
const QTypeInfo& grouped_info(QType type);
const std::vector<QTypeInfo>& grouped_infos();

}  // namespace kt
