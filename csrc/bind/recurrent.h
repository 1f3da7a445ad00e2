// The step of recurrent layers as Python passes it.
#pragma once
#include <tuple>

#include "bind/args.h"

// (rows, sequences, slots, addresses of first_rows, read_slots, write_slots, save_slots)
using StepTuple = std::tuple<int64_t, int64_t, int64_t, kt::Address, kt::Address, kt::Address, kt::Address>;

inline kt::RecurrentStep step_of(const StepTuple& t) {
  return {std::get<0>(t),
          std::get<1>(t),
          std::get<2>(t),
          kt::at<const int32_t>(std::get<3>(t)),
          kt::at<const int32_t>(std::get<4>(t)),
          kt::at<const int32_t>(std::get<5>(t)),
          kt::at<const int32_t>(std::get<6>(t))};
}
