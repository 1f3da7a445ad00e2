// Enums whose kinds Python knows by name. Each is one list of (kind, name): what numbers there are, their check and
// what Python is told (bind/args.h) follow from it.
// No code lives here: see types.h.
#pragma once
#include <cstdint>

#define KT_ENUM_KIND(kind, name) kind,
#define KT_ENUM_NAME(kind, name) name,

// KIND_LIST(ENTRY) applies ENTRY to each (kind, name); names: the array of the names, by number.
#define KT_NAMED_ENUM(Enum, names, KIND_LIST)            \
  enum class Enum : int32_t { KIND_LIST(KT_ENUM_KIND) }; \
  constexpr const char* names[] = {KIND_LIST(KT_ENUM_NAME)}
