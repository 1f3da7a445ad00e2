// Rows of weights as fp32. Included by a tier file after all layouts, each of which has its Dequantizer beside it.

namespace {

// A row of any type; FP8 has none.
void dequantize_row(QType type, const uint8_t* row, int64_t k, float* out) {
  if (is_grouped(type)) return parts::dequantize_grouped(type, row, k, out);
  with_format(type, [&](auto format) {
    constexpr const FormatInfo& info = decltype(format)::info;
    if constexpr (info.kernels == Kernels::Plain)
      dequantize_float<info.type>(row, k, out);
    else if constexpr (info.kernels == Kernels::Grid)
      Dequantizer<info.type>::row(row, k, out);
    else if constexpr (info.kernels != Kernels::Fp8)
      for (int64_t b = 0; b < k / info.block; ++b) {
        if constexpr (info.row_head > 0)
          Dequantizer<info.type>::scaled(row + info.row_head + info.bytes * b, row_scale<info.row_head>(row),
                                         out + info.block * b);
        else
          Dequantizer<info.type>::block(row + info.bytes * b, out + info.block * b);
      }
  });
}

}  // namespace
