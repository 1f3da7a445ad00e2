// The parts of the module.
#pragma once
#include <nanobind/nanobind.h>

void bind_attention(nanobind::module_& m);  // attention.cpp
void bind_index(nanobind::module_& m);      // attention.cpp
void bind_kv(nanobind::module_& m);         // attention.cpp
void bind_layer(nanobind::module_& m);      // layer.cpp
void bind_profile(nanobind::module_& m);    // profile.cpp
void bind_recurrent(nanobind::module_& m);  // recurrent.cpp
void bind_sampling(nanobind::module_& m);   // sampling.cpp
void bind_store(nanobind::module_& m);      // store.cpp
