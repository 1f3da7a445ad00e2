// The record of a weight type that is known at run time.
#pragma once
#include <vector>

#include "runtime/formats.h"

namespace kt {

// Of the table (formats.h), or of weights in groups; throws std::invalid_argument for a type that there is not.
const FormatInfo& format_info(QType type);

// Those of weights in groups (grouped.h), by their names.
const std::vector<FormatInfo>& grouped_formats();

}  // namespace kt
