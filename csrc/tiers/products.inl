// What multiplies weights. Included by a file of a tier after its SIMD layer; all of it has internal linkage, so that
// no function compiled with one tier's flags (see CMakeLists.txt) can stand in for another tier's. What a file does not
// call is not compiled in it.
#include "kernels/parts.h"

#include "kernels/common/math.inl"
#include "kernels/formats/kernel.inl"
#include "kernels/formats/grids.inl"
#include "kernels/formats/quant.inl"
#include "kernels/formats/low.inl"
#include "kernels/formats/unquantized.inl"
#include "kernels/formats/gemm.inl"
#include "kernels/packed/vbmi.inl"
#include "kernels/packed/packed.inl"
#include "kernels/packed/narrow.inl"
#include "kernels/packed/grid.inl"
#include "kernels/packed/packing.inl"
#include "kernels/packed/signed.inl"
#include "kernels/packed/k2k3.inl"
#include "kernels/packed/ternary.inl"
#include "kernels/packed/small.inl"
#include "kernels/packed/fp8.inl"
#include "kernels/packed/groups.inl"
#include "kernels/formats/dequantize.inl"
