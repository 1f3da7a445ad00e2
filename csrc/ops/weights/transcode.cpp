// See transcode.h. Block layouts are those that gguf.quants decodes; plain loops, which compilers turn into vectors.
#include "ops/weights/transcode.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

constexpr int kQ5_0 = 6, kQ3_K = 11, kIQ4_NL = 20;  // ggml's numbers
constexpr int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// d[2] qh[4] qs[16] -> d[2] q[32]
void q5_0_block(const uint8_t* p, uint8_t* out) {
  std::memcpy(out, p, 2);
  const uint32_t upper = p[2] | p[3] << 8 | p[4] << 16 | static_cast<uint32_t>(p[5]) << 24;
  for (int i = 0; i < 16; ++i) {
    out[2 + i] = static_cast<uint8_t>(((p[6 + i] & 15) | (upper >> i & 1) << 4) - 16);
    out[18 + i] = static_cast<uint8_t>((p[6 + i] >> 4 | (upper >> (16 + i) & 1) << 4) - 16);
  }
}

// d[2] qs[16] -> d[2] q[32]
void iq4_nl_block(const uint8_t* p, uint8_t* out) {
  std::memcpy(out, p, 2);
  for (int i = 0; i < 16; ++i) {
    out[2 + i] = static_cast<uint8_t>(kIq4NlValues[p[2 + i] & 15]);
    out[18 + i] = static_cast<uint8_t>(kIq4NlValues[p[2 + i] >> 4]);
  }
}

// hmask[32] qs[64] scales[12] d[2] -> ql[128] qh[64] scales[16] d[2]. A code from -4 to 3 becomes one from 28 to 35.
void q3_k_block(const uint8_t* p, uint8_t* out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* q = p + 32 + 32 * half;
    uint8_t *low = out + 64 * half, *high = out + 128 + 32 * half;
    for (int l = 0; l < 32; ++l) {
      uint8_t code[4];
      for (int j = 0; j < 4; ++j)
        code[j] = static_cast<uint8_t>(28 + (q[l] >> (2 * j) & 3) + 4 * (p[l] >> (4 * half + j) & 1));
      low[l] = static_cast<uint8_t>((code[0] & 15) | code[2] << 4);
      low[32 + l] = static_cast<uint8_t>((code[1] & 15) | code[3] << 4);
      high[l] = static_cast<uint8_t>(code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6);
    }
  }
  const uint8_t* scales = p + 96;
  for (int s = 0; s < 16; ++s) {
    const int lower = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    out[192 + s] = static_cast<uint8_t>((lower | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32);
  }
  std::memcpy(out + 208, p + 108, 2);
}

template <int FROM, int TO, class Block>
void each(const uint8_t* blocks, int64_t count, uint8_t* out, const Block& block) {
  for (int64_t b = 0; b < count; ++b) block(blocks + FROM * b, out + TO * b);
}

}  // namespace

void transcode(int type, const uint8_t* blocks, int64_t count, uint8_t* out) {
  switch (type) {
    case kQ5_0: return each<22, 34>(blocks, count, out, q5_0_block);
    case kIQ4_NL: return each<18, 34>(blocks, count, out, iq4_nl_block);
    case kQ3_K: return each<110, 210>(blocks, count, out, q3_k_block);
    default: throw std::invalid_argument("type " + std::to_string(type) + " is not transcoded here");
  }
}

}  // namespace kt
