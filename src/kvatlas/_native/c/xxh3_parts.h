/* What XXH3's ways of reading a message have in common; inline, because a block key is made of little else. */
#ifndef KVA_XXH3_PARTS_H
#define KVA_XXH3_PARTS_H

#include "xxh3.h"
#include "xxh64.h"

#define KVA_XXH_PRIME32_1 0x9e3779b1u
#define KVA_XXH_PRIME32_2 0x85ebca77u
#define KVA_XXH_PRIME32_3 0xc2b2ae3du
#define KVA_XXH3_MIX_1 0x165667919e3779f9u
#define KVA_XXH3_MIX_2 0x9fb21c651e98df25u
/* Messages of 129 to 240 bytes: where in the secret the second half of the reading starts, and its last 16 bytes. */
enum { KVA_XXH3_MID_START = 3, KVA_XXH3_MID_END = 119 };
/* Longer messages: where in the secret the merging of the eight lanes starts. */
enum { KVA_XXH3_MERGE_START = 11, KVA_XXH3_LANES = 64 };

extern const uint8_t kva_xxh3_secret[KVA_XXH3_SECRET];

/* The low half of the 128-bit product; the high half goes to `high`. */
static inline uint64_t kva_product128(uint64_t a, uint64_t b, uint64_t *high)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    *high = (uint64_t)(product >> 64);
    return (uint64_t)product;
#else
    uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);
    uint64_t mid_1 = (a >> 32) * (b & 0xffffffffu);
    uint64_t mid_2 = (a & 0xffffffffu) * (b >> 32);
    uint64_t carry = (low >> 32) + (mid_1 & 0xffffffffu) + mid_2;
    *high = (a >> 32) * (b >> 32) + (mid_1 >> 32) + (carry >> 32);
    return carry << 32 | (low & 0xffffffffu);
#endif
}

static inline uint64_t kva_xxh3_fold_product(uint64_t a, uint64_t b)
{
    uint64_t high, low = kva_product128(a, b, &high);
    return low ^ high;
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

static inline uint64_t kva_xxh3_mix16(const uint8_t *data, const uint8_t *key, uint64_t seed)
{
    return kva_xxh3_mix(kva_load64le(data), kva_load64le(data + 8), key, seed);
}

/* Two neighbouring words of the secret, XORed: the key of short messages. */
static inline uint64_t kva_xxh3_secret_xor(size_t at)
{
    return kva_load64le(kva_xxh3_secret + at) ^ kva_load64le(kva_xxh3_secret + at + 8);
}

/* Messages over 240 bytes: the eight lanes they end in, and a 64-bit hash of those. */
void kva_xxh3_accumulate(const kva_xxh3_key *seed_key, const uint8_t *data, size_t length, uint64_t acc[8]);
uint64_t kva_xxh3_merge(const uint64_t acc[8], const uint8_t *key, uint64_t start);

#endif
