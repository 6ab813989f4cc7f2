/* What XXH3's ways of reading a message have in common; inline, because a block key is made of little else. */
#ifndef KVA_XXH3_PARTS_H
#define KVA_XXH3_PARTS_H

#include "bytes.h"
#include "xxh3.h"

#define KVA_XXH3_PRIME64_1 0x9e3779b185ebca87u
#define KVA_XXH3_MIX_1 0x165667919e3779f9u
/* Messages of 129 to 240 bytes: where in the secret the second half of the reading starts, and its last 16 bytes. */
enum { KVA_XXH3_MID_START = 3, KVA_XXH3_MID_END = 119 };

extern const uint8_t kva_xxh3_secret[KVA_XXH3_SECRET];

/* Low and high half of the 128-bit product, XORed. */
static inline uint64_t kva_xxh3_fold_product(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);
    uint64_t mid_1 = (a >> 32) * (b & 0xffffffffu);
    uint64_t mid_2 = (a & 0xffffffffu) * (b >> 32);
    uint64_t carry = (low >> 32) + (mid_1 & 0xffffffffu) + mid_2;
    return (carry << 32 | (low & 0xffffffffu)) ^ ((a >> 32) * (b >> 32) + (mid_1 >> 32) + (carry >> 32));
#endif
}

static inline uint64_t kva_xxh3_avalanche(uint64_t h)
{
    h = (h ^ h >> 37) * KVA_XXH3_MIX_1;
    return h ^ h >> 32;
}

static inline uint64_t kva_xxh3_mix(uint64_t first, uint64_t second, const uint8_t *key, uint64_t seed)
{
    return kva_xxh3_fold_product(first ^ (kva_load64le(key) + seed), second ^ (kva_load64le(key + 8) - seed));
}

#endif
