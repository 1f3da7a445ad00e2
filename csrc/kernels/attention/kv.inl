// Keys and values as a cache keeps them (KvType): how rows become codes, and codes numbers again. Included by a tier
// file after math.inl.
//
// A head's part with a scale of its own, m the largest magnitude in it:
//   I8   q = rint(x * (127 / m)),              scale = m / 127
//   F8   q = nearest e4m3 to x * (448 / m),    scale = m / 448     (ties to even; a code is sign, 4 bits, 3 bits)
// m below 2^-100 counts as 0: codes and scale are 0. A part with an infinity or a NaN has the scale NaN.
// A number that is read is the code's, without the scale: attention.inl says where scales are multiplied.

namespace {

constexpr float kLeastLargest = 0x1p-100f;  // below, 448 / m would overflow

inline vf magnitude(vf x) { return from_bits(andi(bits(x), set1i(0x7fffffff))); }

// Round to nearest even. Every NaN becomes the same one.
inline uint16_t kv_to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint32_t rounded = (word + 0x7fffu + (word >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Codes of magnitudes up to 448, as signed bytes.
inline vi to_f8(vf x) {
  const vf size = magnitude(x);
  const vi word = bits(size);
  // 20 of 23 bits of the mantissa are rounded away, the exponent's bias becomes 7 instead of 127.
  const vi odd = andi(sar<20>(word), set1i(1));
  const vi normal = subi(sar<20>(addi(addi(word, odd), set1i(0x7ffff))), set1i(120 << 3));
  const vi subnormal = to_int(mul(size, set1(512.0f)));  // 8 of them are the least normal number, of code 8
  const vi code = bits(select(less(size, set1(0x1p-6f)), from_bits(subnormal), from_bits(normal)));
  return ori(code, andi(sar<24>(bits(x)), set1i(-128)));
}

template <KvType TYPE> void store_codes(const float* x, int64_t n, float factor, int8_t* out) {
  const auto code = [&](vf v) {
    const vf scaled = mul(v, set1(factor));
    return TYPE == KvType::I8 ? to_int(scaled) : to_f8(scaled);
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_int8(out + i, code(load(x + i)));
  if (i == n) return;
  int8_t rest[16];
  store_int8(rest, code(load_n(x + i, static_cast<int>(n - i))));
  std::memcpy(out + i, rest, static_cast<size_t>(n - i));
}

// `n` numbers of a head to `out`; scale: of codes, else unused.
void store_kv(KvType type, const float* x, int64_t n, uint8_t* out, float* scale) {
  if (type == KvType::F32) {
    std::memcpy(out, x, sizeof *x * static_cast<size_t>(n));
    return;
  }
  if (type == KvType::BF16) {
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t rounded = kv_to_bf16(x[i]);
      std::memcpy(out + 2 * i, &rounded, 2);
    }
    return;
  }
  vf largest = zero(), invalid = zero();  // 0 times a number, NaN where it is none
  for (int64_t i = 0; i < n; i += 16) {
    const vf v = load_n(x + i, static_cast<int>(n - i < 16 ? n - i : 16));
    largest = max_(magnitude(v), largest);
    invalid = fma_(v, zero(), invalid);
  }
  const float m = reduce_max(largest), most = type == KvType::I8 ? 127.0f : 448.0f, bad = reduce_add(invalid);
  if (bad != 0.0f || m < kLeastLargest) {  // NaN is not 0 either
    std::memset(out, 0, static_cast<size_t>(n));
    *scale = bad != 0.0f ? __builtin_nanf("") : 0.0f;
    return;
  }
  *scale = m / most;
  if (type == KvType::I8)
    store_codes<KvType::I8>(x, n, most / m, reinterpret_cast<int8_t*>(out));
  else
    store_codes<KvType::F8>(x, n, most / m, reinterpret_cast<int8_t*>(out));
}

// What e4m3 codes in the upper bytes of lanes stand for: with their exponent at fp32's, 2^120 times too small.
inline vf from_f8(vi code) {
  const vi sign = andi(code, set1i(INT32_MIN)), size = andi(sar<4>(code), set1i(0x07f00000));
  return mul(from_bits(ori(sign, size)), set1(0x1p120f));
}

// The number in part J of words of 4 bytes.
template <KvType TYPE, int J> inline vf number_of(vi words) {
  if constexpr (TYPE == KvType::BF16) return from_bits(J == 0 ? shl<16>(words) : andi(words, set1i(-65536)));
  if constexpr (TYPE == KvType::I8) return to_float(sar<24>(shl<24 - 8 * J>(words)));
  if constexpr (TYPE == KvType::F8) return from_f8(shl<24 - 8 * J>(words));
  return from_bits(words);
}

// 16 words of 16 rows to dst[word][row]; bytes: that are there of each row, zeros stand for others.
inline void stage_words(const uint8_t* const* rows, int64_t at, int bytes, float* dst) {
  if (bytes >= 64) return store_columns16(rows, at, dst);
  alignas(64) uint8_t copy[16][64];
  const uint8_t* src[16];
  std::memset(copy, 0, sizeof copy);
  for (int r = 0; r < 16; ++r) {
    std::memcpy(copy[r], rows[r] + at, static_cast<size_t>(bytes));
    src[r] = copy[r];
  }
  store_columns16(src, 0, dst);
}

// Dimensions first .. first + cols - 1 of 16 positions to w[dimension][position], zeros up to a multiple of 64 bytes.
template <KvType TYPE> void stage_columns(const uint8_t* const* rows, int first, int cols, float* w) {
  constexpr int kBytes = static_cast<int>(kv_bytes(TYPE)), kInWord = 4 / kBytes, kGroup = 16 * kInWord;
  for (int c = 0; c < cols; c += kGroup) {
    const int bytes = (cols - c < kGroup ? cols - c : kGroup) * kBytes;
    float* out = w + c * 16;
    if constexpr (TYPE == KvType::F32) {
      stage_words(rows, (first + c) * kBytes, bytes, out);
    } else {
      alignas(64) float words[16 * 16];
      stage_words(rows, (first + c) * kBytes, bytes, words);
      for (int i = 0; i < 16; ++i, out += 16 * kInWord) {
        const vi word = bits(load(words + i * 16));
        store(out, number_of<TYPE, 0>(word));
        store(out + 16, number_of<TYPE, 1>(word));
        if constexpr (kInWord == 4) {
          store(out + 32, number_of<TYPE, 2>(word));
          store(out + 48, number_of<TYPE, 3>(word));
        }
      }
    }
  }
}

template <KvType TYPE> inline vf load_numbers(const uint8_t* p) {
  if constexpr (TYPE == KvType::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (TYPE == KvType::BF16) return load_bf16(p);
  if constexpr (TYPE == KvType::I8) return to_float(load_s8(p));
  return from_f8(shl<24>(load_s8(p)));
}

// Dimensions d .. d + width - 1 of positions lo .. hi - 1 to out[position][16], zeros behind them.
template <KvType TYPE> void stage_rows(const uint8_t* const* rows, int d, int width, int lo, int hi, float* out) {
  constexpr int64_t kBytes = kv_bytes(TYPE);
  alignas(64) uint8_t copy[64] = {};
  for (int j = lo; j < hi; ++j) {
    const uint8_t* row = rows[j] + d * kBytes;
    if (width < 16) row = static_cast<const uint8_t*>(std::memcpy(copy, row, static_cast<size_t>(width * kBytes)));
    store(out + j * 16, load_numbers<TYPE>(row));
  }
}

}  // namespace
