// Whether a tier looks codes up with AVX512-VBMI (grid_vbmi.inl). A constant of each tier, and no property of the
// kernels: the avx512 tiers share the files of products that have grids.

namespace {

#if defined(__AVX512BW__)
// A machine with products of bf16 has better tiers than avx512_vnni. There that one does without, so that tests see
// both.
inline bool find_vbmi() {
  __builtin_cpu_init();
#if defined(__AVX512BF16__) || defined(__AMX_INT8__)
  return __builtin_cpu_supports("avx512vbmi");
#else
  return __builtin_cpu_supports("avx512vbmi") && !__builtin_cpu_supports("avx512bf16");
#endif
}
const bool kHasVbmi = find_vbmi();
#else
constexpr bool kHasVbmi = false;
#endif

}  // namespace
