# The tiers of instructions: which ones are compiled, from what, and with which flags. Included by CMakeLists.txt.
#
# Sources are compiled once for each tier and take from definitions which one it is:
#   KT_NAME, KT_TIER      its name, and its namespace
#   KT_PARTS              the namespace of the tier whose parts (csrc/kernels/parts.h) it has: its own, or its base's
#   KT_SIMD, KT_SIMD_BF16, KT_TILES     its layers of csrc/simd
# The longest come first, so that no core waits for them in the end.

set(KT_TIERS "")
set(KT_WHOLE
  csrc/tiers/parts/packed.cpp
  csrc/tiers/parts/small.cpp
  csrc/tiers/whole.cpp
  csrc/tiers/parts/groups.cpp
  csrc/tiers/parts/grids.cpp)
set(KT_WITH_TILES
  csrc/tiers/parts/tiles_bf16.cpp
  csrc/tiers/with_tiles.cpp)

#   kt_add_tier(NAME BASE base SOURCES files SIMD header BF16 header [TILES header] [FLAGS flags] [LEVEL -On])
# LEVEL: KT_LEVEL where it is not said.
function(kt_add_tier name)
  cmake_parse_arguments(PARSE_ARGV 1 T "" "BASE;SIMD;BF16;TILES;LEVEL" "SOURCES;FLAGS")
  if(NOT T_LEVEL)
    set(T_LEVEL ${KT_LEVEL})
  endif()
  kt_add_objects(kt_${name} ${T_LEVEL} ${T_SOURCES})
  target_compile_options(kt_${name} PRIVATE ${T_FLAGS} -Wno-unused-function)
  # GCC inlines less where a file is small: kernels that are inlined in a large one would be up to a fifth slower.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND T_LEVEL STREQUAL "-O3")
    target_compile_options(kt_${name} PRIVATE --param=inline-unit-growth=200)
  endif()
  target_compile_definitions(kt_${name} PRIVATE
    KT_NAME="${name}"
    KT_TIER=${name}_tier
    KT_PARTS=${T_BASE}_tier
    KT_SIMD="simd/${T_SIMD}.h"
    KT_SIMD_BF16="simd/${T_BF16}.h"
    KT_TILES="simd/${T_TILES}.h")
  set(KT_TIERS ${KT_TIERS} ${name} PARENT_SCOPE)
endfunction()

# ---- what the processor and the compiler have ----

set(KT_WANTED "")  # besides the scalar tier
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(KT_X86 ON)
  set(KT_WANTED avx2 avx_vnni avx512_vnni avx512_bf16 amx)
  set(KT_AVX2_FLAGS -mavx2 -mfma -mf16c)
  set(KT_AVX512_FLAGS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c
                      -mprefer-vector-width=512)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("-mavxvnni" KT_HAS_AVX_VNNI_FLAG)
  check_cxx_compiler_flag("-mavx512bf16" KT_HAS_AVX512_BF16_FLAG)
  check_cxx_compiler_flag("-mamx-tile -mamx-int8 -mamx-bf16" KT_HAS_AMX_FLAGS)
  if(NOT KT_HAS_AVX_VNNI_FLAG)
    message(STATUS "The compiler has no AVX-VNNI (GCC 11 has): built without that tier")
    list(REMOVE_ITEM KT_WANTED avx_vnni)
  endif()
  if(NOT KT_HAS_AVX512_BF16_FLAG)
    message(STATUS "The compiler has no AVX512-BF16 (GCC 10 has): built without that tier")
    list(REMOVE_ITEM KT_WANTED avx512_bf16)
  endif()
  if(NOT KT_HAS_AMX_FLAGS)
    message(STATUS "The compiler has no AMX (GCC 11 has): built without that tier")
    list(REMOVE_ITEM KT_WANTED amx)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # GCC before 14 warns about its own AVX-512 headers (GCC bug 105593)
    list(APPEND KT_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(KT_WANTED neon_dotprod neon_i8mm)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("-march=armv8.2-a+dotprod+i8mm" KT_HAS_I8MM_FLAG)
  if(NOT KT_HAS_I8MM_FLAG)
    message(STATUS "The compiler has no i8mm (GCC 10 has): built without that tier")
    list(REMOVE_ITEM KT_WANTED neon_i8mm)
  endif()
endif()

# ---- which ones are compiled ----

# The tier that this machine would choose, and the one that it builds on. The compiler knows what instructions the
# processor and the operating system have.
function(kt_keep_native_tiers)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
                  OUTPUT_VARIABLE macros ERROR_VARIABLE refusal RESULT_VARIABLE failed)
  if(failed)
    message(STATUS "The compiler does not say what this processor has: all tiers are compiled (${refusal})")
    return()
  endif()
  if("amx" IN_LIST KT_WANTED AND macros MATCHES "__AMX_INT8__" AND macros MATCHES "__AVX512VNNI__")
    set(kept avx512_vnni amx)
  elseif("avx512_bf16" IN_LIST KT_WANTED AND macros MATCHES "__AVX512BF16__" AND macros MATCHES "__AVX512VNNI__")
    set(kept avx512_vnni avx512_bf16)
  elseif(macros MATCHES "__AVX512VNNI__")
    set(kept avx512_vnni)
  elseif("avx_vnni" IN_LIST KT_WANTED AND macros MATCHES "__AVXVNNI__")
    set(kept avx_vnni)
  elseif(macros MATCHES "__AVX2__")
    set(kept avx2)
  elseif("neon_i8mm" IN_LIST KT_WANTED AND macros MATCHES "__ARM_FEATURE_MATMUL_INT8")
    set(kept neon_i8mm)
  elseif(macros MATCHES "__ARM_FEATURE_DOTPROD")
    set(kept neon_dotprod)
  else()
    set(kept "")
  endif()
  set(KT_WANTED ${kept} PARENT_SCOPE)
endfunction()

if(NOT KTRANSFORMERS_TIERS MATCHES "^(native|all)$")
  message(FATAL_ERROR "KTRANSFORMERS_TIERS=${KTRANSFORMERS_TIERS} is not known; it is native or all")
endif()
if(KT_WANTED AND KTRANSFORMERS_TIERS STREQUAL "native" AND NOT CMAKE_CROSSCOMPILING)
  kt_keep_native_tiers()
endif()
string(REPLACE ";" ", " KT_SHOWN "scalar;${KT_WANTED}")
message(STATUS "KTRANSFORMERS_TIERS=${KTRANSFORMERS_TIERS}: compiles ${KT_SHOWN}")

# ---- their sources and flags ----

if("avx2" IN_LIST KT_WANTED)
  kt_add_tier(avx2 BASE avx2 SOURCES ${KT_WHOLE} SIMD avx2 BF16 bf16_fma FLAGS ${KT_AVX2_FLAGS})
endif()
if("avx_vnni" IN_LIST KT_WANTED)
  kt_add_tier(avx_vnni BASE avx_vnni SOURCES ${KT_WHOLE} SIMD avx2 BF16 bf16_fma FLAGS ${KT_AVX2_FLAGS} -mavxvnni)
endif()
if("amx" IN_LIST KT_WANTED)
  kt_add_tier(amx BASE avx512_vnni SOURCES ${KT_WITH_TILES} SIMD avx512 BF16 bf16_avx512 TILES tiles_amx
              FLAGS ${KT_AVX512_FLAGS} -mamx-tile -mamx-int8 -mamx-bf16)
endif()
if("avx512_bf16" IN_LIST KT_WANTED)
  kt_add_tier(avx512_bf16 BASE avx512_vnni SOURCES csrc/tiers/with_bf16.cpp SIMD avx512 BF16 bf16_avx512
              FLAGS ${KT_AVX512_FLAGS} -mavx512bf16)
endif()
if("avx512_vnni" IN_LIST KT_WANTED)
  kt_add_tier(avx512_vnni BASE avx512_vnni SOURCES ${KT_WHOLE} SIMD avx512 BF16 bf16_fma FLAGS ${KT_AVX512_FLAGS})
endif()
if("neon_dotprod" IN_LIST KT_WANTED)
  kt_add_tier(neon_dotprod BASE neon_dotprod SOURCES ${KT_WHOLE} SIMD neon BF16 bf16_neon
              FLAGS -march=armv8.2-a+dotprod)
endif()
if("neon_i8mm" IN_LIST KT_WANTED)
  kt_add_tier(neon_i8mm BASE neon_i8mm SOURCES ${KT_WHOLE} SIMD neon BF16 bf16_neon
              FLAGS -march=armv8.2-a+dotprod+i8mm)
endif()
# Beside a better tier the scalar one is a fallback and an oracle, and nobody waits for it; its bits are the same.
set(KT_SCALAR_LEVEL -O3)
if(KT_WANTED)
  set(KT_SCALAR_LEVEL -O1)
endif()
kt_add_tier(scalar BASE scalar SOURCES ${KT_WHOLE} SIMD scalar BF16 bf16_scalar LEVEL ${KT_SCALAR_LEVEL})
# Nor for those that only tests run: at -O3 they took a third of the time of compiling everything.
if(KTRANSFORMERS_EMULATED)
  kt_add_tier(amx_emulated BASE scalar SOURCES ${KT_WITH_TILES} SIMD scalar BF16 bf16_scalar TILES tiles_emulated
              LEVEL -O1)
  if(KT_X86)
    kt_add_tier(avx_vnni_emulated BASE avx_vnni_emulated SOURCES ${KT_WHOLE} SIMD avx2 BF16 bf16_fma LEVEL -O1
                FLAGS ${KT_AVX2_FLAGS} -DKT_EMULATED_VNNI)
  endif()
  kt_add_tier(avx512_bf16_emulated BASE scalar SOURCES csrc/tiers/with_bf16.cpp SIMD scalar BF16 bf16_scalar LEVEL -O1)
endif()
