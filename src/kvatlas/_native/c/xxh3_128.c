/* Written from the algorithm's published description; checked against the xxhash package for every length class. */
#include "xxh3_parts.h"

typedef struct {
    uint64_t low, high;
} pair;

static pair up_to_3(const uint8_t *data, size_t length, uint64_t seed)
{
    uint32_t all = (uint32_t)data[0] << 16 | (uint32_t)data[length >> 1] << 24 | data[length - 1] |
                   (uint32_t)length << 8;
    uint32_t swapped = kva_swap32(all);
    uint64_t low_key = (kva_load32le(kva_xxh3_secret) ^ kva_load32le(kva_xxh3_secret + 4)) + seed;
    uint64_t high_key = (kva_load32le(kva_xxh3_secret + 8) ^ kva_load32le(kva_xxh3_secret + 12)) - seed;
    return (pair){kva_xxh64_avalanche(all ^ low_key),
                  kva_xxh64_avalanche((swapped << 13 | swapped >> 19) ^ high_key)};
}

static pair up_to_8(const uint8_t *data, size_t length, uint64_t seed)
{
    seed ^= (uint64_t)kva_swap32((uint32_t)seed) << 32;
    uint64_t both = kva_load32le(data) | (uint64_t)kva_load32le(data + length - 4) << 32;
    uint64_t high, low = kva_product128(both ^ (kva_xxh3_secret_xor(16) + seed), KVA_XXH_PRIME64_1 + 4 * length, &high);
    high += low << 1;
    low ^= high >> 3;
    low = (low ^ low >> 35) * KVA_XXH3_MIX_2;
    return (pair){low ^ low >> 28, kva_xxh3_avalanche(high)};
}

static pair up_to_16(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t last = kva_load64le(data + length - 8);
    uint64_t mixed = kva_load64le(data) ^ last ^ (kva_xxh3_secret_xor(32) - seed);
    uint64_t high, low = kva_product128(mixed, KVA_XXH_PRIME64_1, &high);
    low += (uint64_t)(length - 1) << 54;
    last ^= kva_xxh3_secret_xor(48) + seed;
    high += last + (last & 0xffffffffu) * (KVA_XXH_PRIME32_2 - 1);
    low ^= kva_swap64(high);
    uint64_t end_high, end_low = kva_product128(low, KVA_XXH_PRIME64_2, &end_high);
    end_high += high * KVA_XXH_PRIME64_2;
    return (pair){kva_xxh3_avalanche(end_low), kva_xxh3_avalanche(end_high)};
}

static pair of_nothing(uint64_t seed)
{
    return (pair){kva_xxh64_avalanche(seed ^ kva_xxh3_secret_xor(64)),
                  kva_xxh64_avalanche(seed ^ kva_xxh3_secret_xor(80))};
}

/* 32 bytes in two halves, each mixed into one of the sums and added to the other. */
static inline pair mix32(pair sum, const uint8_t *first, const uint8_t *second, const uint8_t *key, uint64_t seed)
{
    sum.low += kva_xxh3_mix16(first, key, seed);
    sum.low ^= kva_load64le(second) + kva_load64le(second + 8);
    sum.high += kva_xxh3_mix16(second, key + 16, seed);
    sum.high ^= kva_load64le(first) + kva_load64le(first + 8);
    return sum;
}

static pair finish_sums(pair sum, size_t length, uint64_t seed)
{
    uint64_t high = sum.low * KVA_XXH_PRIME64_1 + sum.high * KVA_XXH_PRIME64_4 + (length - seed) * KVA_XXH_PRIME64_2;
    return (pair){kva_xxh3_avalanche(sum.low + sum.high), 0 - kva_xxh3_avalanche(high)};
}

static pair up_to_128(const uint8_t *data, size_t length, uint64_t seed)
{
    pair sum = {length * KVA_XXH_PRIME64_1, 0};
    /* Pairs of 16 bytes from both ends, the innermost first; they overlap in the middle. */
    for (size_t i = (length - 1) / 32 + 1; i-- > 0;)
        sum = mix32(sum, data + 16 * i, data + length - 16 * (i + 1), kva_xxh3_secret + 32 * i, seed);
    return finish_sums(sum, length, seed);
}

static pair up_to_240(const uint8_t *data, size_t length, uint64_t seed)
{
    pair sum = {length * KVA_XXH_PRIME64_1, 0};
    for (size_t i = 0; i < 4; i++)
        sum = mix32(sum, data + 32 * i, data + 32 * i + 16, kva_xxh3_secret + 32 * i, seed);
    sum.low = kva_xxh3_avalanche(sum.low);
    sum.high = kva_xxh3_avalanche(sum.high);
    for (size_t i = 4; i < length / 32; i++)
        sum = mix32(sum, data + 32 * i, data + 32 * i + 16, kva_xxh3_secret + KVA_XXH3_MID_START + 32 * (i - 4), seed);
    sum = mix32(sum, data + length - 16, data + length - 32, kva_xxh3_secret + KVA_XXH3_MID_END - 16, 0 - seed);
    return finish_sums(sum, length, seed);
}

static pair over_240(const kva_xxh3_key *key, const uint8_t *data, size_t length)
{
    uint64_t acc[8];
    kva_xxh3_accumulate(key, data, length, acc);
    const uint8_t *high_key = key->secret + KVA_XXH3_SECRET - KVA_XXH3_LANES - KVA_XXH3_MERGE_START;
    return (pair){kva_xxh3_merge(acc, key->secret + KVA_XXH3_MERGE_START, length * KVA_XXH_PRIME64_1),
                  kva_xxh3_merge(acc, high_key, ~(length * KVA_XXH_PRIME64_2))};
}

void kva_xxh3_128(const kva_xxh3_key *key, const uint8_t *data, size_t length, uint8_t digest[KVA_XXH3_128_BYTES])
{
    pair hash;
    if (length > 240)
        hash = over_240(key, data, length);
    else if (length > 128)
        hash = up_to_240(data, length, key->seed);
    else if (length > 16)
        hash = up_to_128(data, length, key->seed);
    else if (length > 8)
        hash = up_to_16(data, length, key->seed);
    else if (length > 3)
        hash = up_to_8(data, length, key->seed);
    else
        hash = length > 0 ? up_to_3(data, length, key->seed) : of_nothing(key->seed);
    kva_store64be(digest, hash.high);
    kva_store64be(digest + 8, hash.low);
}
