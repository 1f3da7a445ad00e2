// What multiplies weights. Included by a tier file after its SIMD layer; all of it has internal linkage, so that no
// function compiled with one tier's flags (see CMakeLists.txt) can stand in for another tier's.
#include "kernels/math.inl"
#include "kernels/quant.inl"
#include "kernels/formats_low.inl"
#include "kernels/gemm.inl"
#include "kernels/packed.inl"
#include "kernels/narrow.inl"
#include "kernels/packing.inl"
#include "kernels/packed_k2k3.inl"
#include "kernels/packed_ternary.inl"
#include "kernels/packed_small.inl"
#include "kernels/fp8.inl"
