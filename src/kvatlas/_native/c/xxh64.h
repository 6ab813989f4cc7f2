/* XXH64. Written from the algorithm's published description; checked against the xxhash package. */
#ifndef KVA_XXH64_H
#define KVA_XXH64_H

#include "bytes.h"

#define KVA_XXH_PRIME64_1 0x9e3779b185ebca87u
#define KVA_XXH_PRIME64_2 0xc2b2ae3d27d4eb4fu
#define KVA_XXH_PRIME64_3 0x165667b19e3779f9u
#define KVA_XXH_PRIME64_4 0x85ebca77c2b2ae63u
#define KVA_XXH_PRIME64_5 0x27d4eb2f165667c5u

static inline uint64_t kva_rotate_left64(uint64_t v, unsigned by)
{
    return v << by | v >> (64 - by);
}

static inline uint64_t kva_xxh64_avalanche(uint64_t h)
{
    h = (h ^ h >> 33) * KVA_XXH_PRIME64_2;
    h = (h ^ h >> 29) * KVA_XXH_PRIME64_3;
    return h ^ h >> 32;
}

static inline uint64_t kva_xxh64_round(uint64_t lane, uint64_t input)
{
    return kva_rotate_left64(lane + input * KVA_XXH_PRIME64_2, 31) * KVA_XXH_PRIME64_1;
}

static inline uint64_t kva_xxh64(const uint8_t *data, size_t length, uint64_t seed)
{
    const uint8_t *end = data + length;
    uint64_t h = seed + KVA_XXH_PRIME64_5;
    if (length >= 32) {
        uint64_t lanes[4] = {seed + KVA_XXH_PRIME64_1 + KVA_XXH_PRIME64_2, seed + KVA_XXH_PRIME64_2, seed,
                             seed - KVA_XXH_PRIME64_1};
        for (; end - data >= 32; data += 32)
            for (int i = 0; i < 4; i++)
                lanes[i] = kva_xxh64_round(lanes[i], kva_load64le(data + 8 * i));
        h = kva_rotate_left64(lanes[0], 1) + kva_rotate_left64(lanes[1], 7) + kva_rotate_left64(lanes[2], 12) +
            kva_rotate_left64(lanes[3], 18);
        for (int i = 0; i < 4; i++)
            h = (h ^ kva_xxh64_round(0, lanes[i])) * KVA_XXH_PRIME64_1 + KVA_XXH_PRIME64_4;
    }
    h += length;
    for (; end - data >= 8; data += 8)
        h = kva_rotate_left64(h ^ kva_xxh64_round(0, kva_load64le(data)), 27) * KVA_XXH_PRIME64_1 + KVA_XXH_PRIME64_4;
    if (end - data >= 4) {
        h = kva_rotate_left64(h ^ kva_load32le(data) * KVA_XXH_PRIME64_1, 23) * KVA_XXH_PRIME64_2 + KVA_XXH_PRIME64_3;
        data += 4;
    }
    for (; data < end; data++)
        h = kva_rotate_left64(h ^ *data * KVA_XXH_PRIME64_5, 11) * KVA_XXH_PRIME64_1;
    return kva_xxh64_avalanche(h);
}

#endif
