// Arguments as Python passes them: addresses and numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops/weights/weights.h"

namespace kt {

using Address = uintptr_t;

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }

inline Layout layout_of(int layout) {
  if (layout < 0 || layout > static_cast<int>(Layout::TilesBf16))
    throw std::invalid_argument("unknown layout " + std::to_string(layout));
  return static_cast<Layout>(layout);
}

inline WeightView weight_at(Address data, int type, int64_t rows, int64_t cols, int layout = 0) {
  return make_view(static_cast<QType>(type), at<const uint8_t>(data), rows, cols, layout_of(layout));
}

inline KvType kv_type_of(int type) {
  if (type < 0 || type > static_cast<int>(KvType::F8))
    throw std::invalid_argument("unknown type of keys and values " + std::to_string(type));
  return static_cast<KvType>(type);
}

// The kind of that number in a KT_NAMED_ENUM, whose names are given. what: of the error.
template <class Enum, size_t count> Enum kind_of(int number, const char* const (&)[count], const char* what) {
  if (number < 0 || number >= static_cast<int>(count))
    throw std::invalid_argument(std::string("unknown ") + what + " " + std::to_string(number));
  return static_cast<Enum>(number);
}

inline ActSpec act_spec(int kind, float alpha, float limit, bool has_gate = true) {
  const auto known = kind_of<ActKind>(kind, kActivationNames, "activation kind");
  if (!has_gate && needs_gate(known))
    throw std::invalid_argument(std::string("activation ") + kActivationNames[kind] + " needs a gate");
  return {known, alpha, limit};
}

}  // namespace kt
