// Weights in groups of columns with scales of their own (runtime/grouped.h), as safetensors hold them: integers of 4 or
// 8 bits, FP8, and NVFP4. Included by a tier file after fp8.inl and packing.inl; computed with in packed form.
//
// In rows, a block of `size` columns is its scale, its zero if there is one, and its codes: bytes, or for every 32
// columns nibbles as in Q4_0 (column i low and 16 + i high in byte i), those of integers being value + 8. NVFP4: an
// fp32 number, the scales of the first and the last 16 columns, and nibbles.
//
// A tile of 16 rows is a head, padded to 64 bytes, and lines as those of Q4_0, Q8_0 (packed.inl) or FP8 (fp8.inl). The
// head: the scales of the 16 rows for each group; then, where there are zeros, theirs, a byte each. NVFP4: 16 fp32
// numbers, 128 times those of the rows, and for every 32 columns pairs of scales of each row.
//
// Every output sees these operations in this order, in every tier, for any number of tokens, on any split. s is the
// scale as fp32, exact; a, da are the int8 activations of a block of 32 and their scale:
//   I4, I8   for every 32 columns:   isum = sum (q[k] - zero) a[k] (int32, exact);   acc = acc + (s * da) * float(isum)
//   NVFP4    for every 16 columns:   d = scale * number, rounded once;                acc = acc + (d * da) *
//   float(isum) F8       for every group, with sums s0 .. s3 as in fp8.inl:                       acc = acc + s * ((s0
//   + s1) + (s2 + s3))
// Sums cannot overflow: |isum| <= 32 * 127 * 256.

#include "runtime/grouped.h"

namespace {

inline vf group_scales(ScaleKind kind, const uint8_t* head, int64_t group) {
  switch (kind) {
    case ScaleKind::F16: return load_f16(head + 32 * group);
    case ScaleKind::BF16: return load_bf16(head + 32 * group);
    case ScaleKind::F32: return load(reinterpret_cast<const float*>(head + 64 * group));
    default: break;
  }
  // 2^(e - 127), of which the smallest is subnormal; of 255 infinity, which less 0 times itself is NaN.
  const vi exponents = shl<23>(andi(load_s8(head + 16 * group), set1i(255)));
  const vf powers = from_bits(maxi(exponents, set1i(0x00400000)));
  return sub(powers, mul(powers, zero()));
}

// The head of a tile of I4, I8 or F8.
struct GroupHead {
  ScaleKind kind;
  int shift;  // blocks of 32 columns to groups
  const uint8_t *scales, *zeros, *lines;

  explicit GroupHead(const TileArgs& a) {
    const GroupForm form(a.type);
    kind = form.scales;
    shift = form.size == 128 ? 2 : 0;
    scales = a.packed;
    zeros = a.packed + a.k / form.size * 16 * form.scale_bytes();
    lines = a.packed + form.tile_head(a.k);
  }
  vf scale(int64_t block) const { return group_scales(kind, scales, block >> shift); }
  vi minus_zero(int64_t block) const { return subi(set1i(0), load_s8(zeros + 16 * (block >> shift))); }
};

// ---- integers ----

template <bool IS_BYTE> struct GroupCodes { using P = PackedQ4_0; };
template <> struct GroupCodes<true> { using P = PackedQ8_0; };

template <bool IS_BYTE, bool HAS_ZERO> struct FewGroups {
  template <int C> static void run(const TileArgs& a, int t) {
    using P = typename GroupCodes<IS_BYTE>::P;
    const GroupHead head(a);
    const uint8_t* p = head.lines;
    prefetch_head(a.packed, p - a.packed);
    const int8_t* y[C];
    const float* da[C];
    const int16_t* sums[C];
    vf acc[C];
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq;
      da[c] = a.act.d + row * a.act.ldd;
      sums[c] = a.act.sums + row * a.act.lds;
      acc[c] = load(a.acc + (t + c) * 16);
    }
    for (int64_t b = 0; b < a.k / 32; ++b, p += P::bytes) {
      for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
      wb steps[8];
      P::unpack(p, steps);
      vi isum[C];
      if constexpr (IS_BYTE) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = sdot_init(sums[c][kSumsPerBlock * b]);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) isum[c] = sdot(isum[c], steps[i], y[c] + 32 * b + 4 * i);
      } else {
        uacc u[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) u[c] = uacc_zero();
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) u[c] = udot(u[c], steps[i], y[c] + 32 * b + 4 * i);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = flush(set1i(-8 * sums[c][kSumsPerBlock * b]), u[c]);
      }
      if constexpr (HAS_ZERO) {
        const vi minus = head.minus_zero(b);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = add_times(isum[c], minus, set1i(sums[c][kSumsPerBlock * b]));
      }
      const vf dw = head.scale(b);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[c] = add(acc[c], mul(mul(dw, set1(da[c][b])), to_float(isum[c])));
    }
    for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
  }
};

// Blocks block .. block + count - 1 of the stage; its sc are the zeros, negated.
template <class F, bool HAS_ZERO, int C>
void group_tokens(const TileArgs& a, const QuantStage& st, int64_t block, int count, int t) {
  for (; t + C <= a.num_tokens; t += C) {
    const int8_t* y[C];
    const float* d[C];
    const int16_t* s[C];
    vf acc[C];
    for (int c = 0; c < C; ++c) {
      const int64_t row = token_row(a, t + c);
      y[c] = a.act.q + row * a.act.ldq + block * 32;
      d[c] = a.act.d + row * a.act.ldd + block;
      s[c] = a.act.sums + row * a.act.lds + kSumsPerBlock * block;
      acc[c] = load(a.acc + (t + c) * 16);
    }
    for (int b = 0; b < count; ++b) {
      const int8_t* yb[C];
      int16_t sb[C];
      vi isum[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        yb[c] = y[c] + 32 * b;
        sb[c] = s[c][kSumsPerBlock * b];
      }
      dot32<F, C>(st.w + 512 * b, yb, sb, isum);
      if constexpr (HAS_ZERO) {
        const vi minus = loadi(st.sc + 16 * b);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) isum[c] = add_times(isum[c], minus, set1i(sb[c]));
      }
      const vf dw = load(st.d + 16 * b);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[c] = add(acc[c], mul(mul(dw, set1(d[c][b])), to_float(isum[c])));
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(a.acc + (t + c) * 16, acc[c]);
  }
  if constexpr (C > 1) group_tokens<F, HAS_ZERO, fewer(C)>(a, st, block, count, t);
}

template <bool IS_BYTE, bool HAS_ZERO> void group_tile(const TileArgs& a) {
  using P = typename GroupCodes<IS_BYTE>::P;
  if (a.num_tokens <= kFewPacked) return in_few_parts<FewGroups<IS_BYTE, HAS_ZERO>>(a);
  const GroupHead head(a);
  const int64_t blocks = a.k / 32;
  const uint8_t* p = head.lines;
  prefetch_head(a.packed, p - a.packed);
  QuantStage st;
  for (int64_t first = 0; first < blocks; first += 8) {
    const int count = static_cast<int>(blocks - first < 8 ? blocks - first : 8);
    for (int b = 0; b < count; ++b, p += P::bytes) {
      wb steps[8];
      for (int64_t o = 0; o < P::bytes; o += 64) prefetch_line(p + o + kAheadPacked);
      P::unpack(p, steps);
      for (int i = 0; i < 8; ++i) store_wb(st.w + 512 * b + 64 * i, steps[i]);
      store(st.d + 16 * b, head.scale(first + b));
      if constexpr (HAS_ZERO) storei(st.sc + 16 * b, head.minus_zero(first + b));
    }
    group_tokens<typename P::F, HAS_ZERO, kQuantTokens>(a, st, first, count, 0);
  }
}

// ---- NVFP4 ----

// Blocks of 32 columns as those of packed/small.inl, whose scales are multiplied with the number of their row.
struct PackedNvfp4Group : PackedNVFP4 {
  static int64_t head(int64_t blocks) { return kNvfp4.tile_head(32 * blocks); }
  static vf scale(const uint8_t* tile, int64_t b, int half = 0) {
    vf first, second;
    fp8_pair(tile + 64 + 32 * b, &first, &second);
    return mul(half == 0 ? first : second, load(reinterpret_cast<const float*>(tile)));
  }
  static vf minimum(const uint8_t* tile, int64_t b) { return scale(tile, b, 1); }
};

// ---- FP8 ----

// The groups of a tile, as fp8.inl goes through its blocks.
struct Fp8Groups {
  GroupHead head;
  int size;
  int64_t count;
  explicit Fp8Groups(const TileArgs& a) : head(a), size(GroupForm(a.type).size), count(a.k / size) {}
  const uint8_t* lines() const { return head.lines; }
  int cols(int64_t) const { return size; }
  // Codes are read as value / 256.
  vf scale(int64_t group) const { return mul(group_scales(head.kind, head.scales, group), set1(256.0f)); }
};

// Adds to a.acc.
void grouped_tile(const TileArgs& a) {
  const GroupForm form(a.type);
  switch (form.codes) {
    case CodeKind::I4: return form.has_zero ? group_tile<false, true>(a) : group_tile<false, false>(a);
    case CodeKind::I8: return form.has_zero ? group_tile<true, true>(a) : group_tile<true, false>(a);
    case CodeKind::F8: return fp8_blocks_tile(a, Fp8Groups(a));
    case CodeKind::E2M1: return small_tile<PackedNvfp4Group>(a);
  }
}

// ---- packing, rows ----

inline void pack_nvfp4_heads(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  for (int r = 0; r < 16; ++r) {
    float number;
    std::memcpy(&number, rows[r], 4);
    number *= 128.0f;  // scales are read as value / 256, codes as twice the value
    std::memcpy(out + 4 * r, &number, 4);
    for (int64_t b = 0; b < k / 32; ++b) {
      const uint8_t* p = rows[r] + b * kNvfp4.block_bytes() + 4;
      std::memcpy(out + 64 + 32 * b + 2 * r, p, 2);
    }
  }
}

// A NaN among the codes of a group shows as a NaN of its scale.
inline void pack_group_heads(const GroupForm& form, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const int64_t groups = k / form.size, zeros = groups * 16 * form.scale_bytes();
  for (int r = 0; r < 16; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* p = rows[r] + g * form.block_bytes();
      uint8_t* to = out + (16 * g + r) * form.scale_bytes();
      std::memcpy(to, p, static_cast<size_t>(form.scale_bytes()));
      if (form.has_zero) out[zeros + 16 * g + r] = p[form.scale_bytes()];
      if (form.codes == CodeKind::F8 && has_fp8_nan(p + form.head_bytes(), form.size)) {
        std::memset(to, 0xff, static_cast<size_t>(form.scale_bytes()));
        if (form.scales != ScaleKind::E8M0) to[form.scale_bytes() - 1] = 0x7f;
      }
    }
}

// 32 columns of a row as bytes; `p` are their codes.
inline void unpack_codes(const GroupForm& form, const uint8_t* p, uint8_t* out) {
  if (form.is_byte())
    std::memcpy(out, p, 32);
  else
    storeb(out, nibbles16(p));
}

void pack_grouped(QType type, const uint8_t* const* rows, int64_t k, uint8_t* out) {
  const GroupForm form(type);
  std::memset(out, 0, static_cast<size_t>(form.tile_head(k)));
  if (form.codes == CodeKind::E2M1)
    pack_nvfp4_heads(rows, k, out);
  else
    pack_group_heads(form, rows, k, out);
  alignas(64) uint8_t unpacked[16][64] = {}, steps[64 * 16];
  const uint8_t* from[16];
  for (int r = 0; r < 16; ++r) from[r] = unpacked[r];
  uint8_t* lines = out + form.tile_head(k);
  for (int64_t b = 0; b < k / 32; ++b) {
    const int64_t group = b / (form.size / 32), at = b % (form.size / 32) * (form.is_byte() ? 32 : 16);
    for (int r = 0; r < 16; ++r)
      unpack_codes(form, rows[r] + group * form.block_bytes() + form.head_bytes() + at, unpacked[r]);
    if (form.codes == CodeKind::F8) {
      pack_fp8_lines(from, 8, lines);
      lines += 512;
      continue;
    }
    transpose16(from, steps);  // the last 32 columns stay zeros
    if (form.is_byte())
      std::memcpy(lines, steps, 512);
    else
      for (int j = 0; j < 256; ++j) lines[j] = static_cast<uint8_t>(steps[j] | steps[256 + j] << 4);
    lines += form.is_byte() ? 512 : 256;
  }
}

// A block at a time is packed and used, as tile_by_blocks does.
void grouped_by_blocks(const TileArgs& a) {
  const GroupForm form(a.type);
  alignas(64) uint8_t room[64 + 16 * 5 + 64 + 128 * 16];
  for (int64_t b = 0; b < a.k / form.size; ++b) {
    const uint8_t* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = a.rows[r] + b * form.block_bytes();
    pack_grouped(a.type, rows, form.size, room);
    TileArgs one = a;
    one.packed = room;
    one.k = form.size;
    if (form.codes == CodeKind::F8) {
      one.act.x += b * form.size;
    } else {
      one.act.q += b * form.size;
      one.act.d += b * (form.size / 32);
      one.act.sums += kSumsPerBlock * b * (form.size / 32);
    }
    grouped_tile(one);
  }
}

// The numbers that an element of the head stands for; of all 16 lanes the first counts.
inline float first_lane(vf x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  return lanes[0];
}

void dequantize_grouped(QType type, const uint8_t* row, int64_t k, float* out) {
  const GroupForm form(type);
  for (int64_t b = 0; b < k / 32; ++b) {
    const int64_t group = b / (form.size / 32), at = b % (form.size / 32) * (form.is_byte() ? 32 : 16);
    const uint8_t* p = row + group * form.block_bytes();
    uint8_t codes[32];
    unpack_codes(form, p + form.head_bytes() + at, codes);
    float* to = out + 32 * b;
    alignas(64) uint8_t head[64] = {};
    if (form.codes == CodeKind::E2M1) {
      float number;
      std::memcpy(&number, p, 4);
      std::memcpy(head, p + 4, 2);
      vf first, second;
      fp8_pair(head, &first, &second);
      const float d[2] = {first_lane(first) * (number * 128.0f), first_lane(second) * (number * 128.0f)};
      for (int i = 0; i < 32; ++i) to[i] = d[i / 16] * static_cast<float>(kMxfp4Values[codes[i]]);
      continue;
    }
    std::memcpy(head, p, static_cast<size_t>(form.scale_bytes()));
    const float scale = first_lane(group_scales(form.scales, head, 0));
    if (form.codes == CodeKind::F8) {
      for (int i = 0; i < 32; i += 2) {
        alignas(64) uint8_t pair[64] = {codes[i], codes[i + 1]};
        vf even, odd;
        fp8_pair(pair, &even, &odd);
        to[i] = (codes[i] & 127) == 127 ? __builtin_nanf("") : scale * (first_lane(even) * 256.0f);
        to[i + 1] = (codes[i + 1] & 127) == 127 ? __builtin_nanf("") : scale * (first_lane(odd) * 256.0f);
      }
      continue;
    }
    const int zero = form.has_zero ? static_cast<int8_t>(p[form.scale_bytes()]) : 0;
    for (int i = 0; i < 32; ++i) {
      const int code = form.is_byte() ? static_cast<int8_t>(codes[i]) : static_cast<int>(codes[i]) - 8;
      to[i] = scale * static_cast<float>(code - zero);
    }
  }
}

}  // namespace
