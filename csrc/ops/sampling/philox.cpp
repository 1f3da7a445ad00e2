#include "ops/sampling/philox.h"

namespace kt {

void philox4x32(uint32_t (&counter)[4], uint32_t (&key)[2]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = counter[0] * uint64_t{0xD2511F53}, second = counter[2] * uint64_t{0xCD9E8D57};
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[1] = static_cast<uint32_t>(second);
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
}

double uniform_at(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  philox4x32(counter, key);
  return static_cast<double>(static_cast<uint64_t>(counter[0]) << 21 | counter[1] >> 11) * 0x1p-53;
}

}  // namespace kt
