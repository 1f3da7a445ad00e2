// Codes looked up by permutations of bytes (AVX512-VBMI), several times faster than one by one. Included by
// packed/grid.inl in tiers with AVX-512; chosen when the machine has the instructions.
//
// A line of 64 codes is looked up in tables of bytes, 128 entries a permutation, which hold the numbers of an entry's
// values (runtime/grids.h): first those of the first half of its columns, then the others. Shifts of 64-bit words take
// out the numbers, byte by byte, and a last permutation makes values of them.

namespace {

#define KT_VBMI __attribute__((target("avx512vbmi")))

// Bytes of `table` for indices of 8 bits and what stands above them: upper[0] is bit 7, upper[1] bit 8, and so on.
template <int SIZE> KT_VBMI inline __m512i look_up_bytes(const uint8_t* table, __m512i index, const __mmask64* upper) {
  if constexpr (SIZE == 128) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  } else {
    constexpr int bit = SIZE == 256 ? 0 : SIZE == 512 ? 1 : SIZE == 1024 ? 2 : 3;
    return _mm512_mask_blend_epi8(upper[bit], look_up_bytes<SIZE / 2>(table, index, upper),
                                  look_up_bytes<SIZE / 2>(table + SIZE / 2, index, upper));
  }
}

// Both halves of 64 entries, and what their numbers stand for.
struct GridNumbers { __m512i low, high; };

// Line m of the codes of part s.
template <class P> KT_VBMI inline GridNumbers look_up_numbers(const uint8_t* p, int s, int m) {
  const auto& grid = grid_of(typename P::Format{});
  constexpr int size = std::decay_t<decltype(grid)>::size;
  const __m512i index = _mm512_loadu_si512(p + P::part_bytes * s + 64 * m);
  __mmask64 upper[4] = {_mm512_movepi8_mask(index), 0, 0, 0};
  if constexpr (P::upper != GridUpper::None) {
    const __m512i above = grid_upper<P>(p, s, m).v;
    upper[1] = _mm512_test_epi8_mask(above, _mm512_set1_epi8(1));
    upper[2] = _mm512_test_epi8_mask(above, _mm512_set1_epi8(2));
    upper[3] = _mm512_test_epi8_mask(above, _mm512_set1_epi8(4));
  }
  return {look_up_bytes<size>(grid.low, index, upper), look_up_bytes<size>(grid.high, index, upper)};
}

// Lines 2 J and 2 J + 1 of a part. numbers: of its lines of codes.
template <class P, uint8_t FLIP, int J>
KT_VBMI inline void finish_numbers(const GridNumbers* numbers, __m512i values, wb x, uint8_t* w) {
  wb first, second;
  if constexpr (P::spec.cols == 8) {  // bit 2 c of byte J of a row
    const __m512i at = _mm512_set1_epi64(0x2624222006040200 + 0x0808080808080808 * J);
    first.v = _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(at, numbers[0].low), values);
    second.v = _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(at, numbers[0].high), values);
  } else {  // bit 4 (c % 2) of byte 2 (J % 2) of a row, and of the next one
    const __m512i at = _mm512_set1_epi64(0x2420242004000400 + 0x1010101010101010 * (J % 2)),
                  next = _mm512_add_epi8(at, _mm512_set1_epi8(8));
    const GridNumbers& n = numbers[J / 2];
    const __mmask64 last = 0xcccccccccccccccc;
    first.v = _mm512_permutexvar_epi8(
        _mm512_mask_multishift_epi64_epi8(_mm512_multishift_epi64_epi8(at, n.low), last, at, n.high), values);
    second.v = _mm512_permutexvar_epi8(
        _mm512_mask_multishift_epi64_epi8(_mm512_multishift_epi64_epi8(next, n.low), last, next, n.high), values);
  }
  finish_lines<P, FLIP, J>(x, first, second, w);
}

template <class P, uint8_t FLIP, bool IN_STREAM> KT_VBMI inline void stage_grid_vbmi(const uint8_t* p, GridStage& st) {
  const __m512i values = _mm512_load_si512(grid_of(typename P::Format{}).values);
  for (int s = 0; s < 8; ++s) {
    if constexpr (IN_STREAM) prefetch_part<P>(p, s);
    GridNumbers numbers[2];
    numbers[0] = look_up_numbers<P>(p, s, 0);
    if constexpr (P::spec.cols == 4) numbers[1] = look_up_numbers<P>(p, s, 1);
    const wb x = grid_signs<P>(p, s);
    uint8_t* w = st.w + 512 * s;
    finish_numbers<P, FLIP, 0>(numbers, values, x, w);
    finish_numbers<P, FLIP, 1>(numbers, values, x, w);
    finish_numbers<P, FLIP, 2>(numbers, values, x, w);
    finish_numbers<P, FLIP, 3>(numbers, values, x, w);
    store_grid_scales<P>(p, s, st.sc + 2 * P::spec.subs * s);
  }
}

#undef KT_VBMI

}  // namespace
