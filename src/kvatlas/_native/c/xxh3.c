/* Written from the algorithm's published description; checked against the xxhash package for every length class. */
#include "xxh3_parts.h"

enum { STRIPE = 64, SECRET_STEP = 8, STRIPES_PER_BLOCK = (KVA_XXH3_SECRET - STRIPE) / SECRET_STEP };

const uint8_t kva_xxh3_secret[KVA_XXH3_SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static uint64_t up_to_16(const uint8_t *data, size_t length, uint64_t seed)
{
    if (length > 8) {
        uint64_t low = kva_load64le(data) ^ (kva_xxh3_secret_xor(24) + seed);
        uint64_t high = kva_load64le(data + length - 8) ^ (kva_xxh3_secret_xor(40) - seed);
        return kva_xxh3_avalanche(length + kva_swap64(low) + high + kva_xxh3_fold_product(low, high));
    }
    if (length >= 4) {
        seed ^= (uint64_t)kva_swap32((uint32_t)seed) << 32;
        uint64_t both = kva_load32le(data + length - 4) + ((uint64_t)kva_load32le(data) << 32);
        uint64_t h = both ^ (kva_xxh3_secret_xor(8) - seed);
        h ^= kva_rotate_left64(h, 49) ^ kva_rotate_left64(h, 24);
        h *= KVA_XXH3_MIX_2;
        h ^= (h >> 35) + length;
        h *= KVA_XXH3_MIX_2;
        return h ^ h >> 28;
    }
    if (length > 0) {
        uint32_t all = (uint32_t)data[0] << 16 | (uint32_t)data[length >> 1] << 24 | data[length - 1] |
                       (uint32_t)length << 8;
        return kva_xxh64_avalanche(all ^ ((kva_load32le(kva_xxh3_secret) ^ kva_load32le(kva_xxh3_secret + 4)) + seed));
    }
    return kva_xxh64_avalanche(seed ^ kva_xxh3_secret_xor(56));
}

static uint64_t up_to_128(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t acc = length * KVA_XXH_PRIME64_1;
    /* Pairs of 16 bytes from both ends, the innermost first; they overlap in the middle. */
    for (size_t pair = (length - 1) / 32 + 1; pair-- > 0;) {
        acc += kva_xxh3_mix16(data + 16 * pair, kva_xxh3_secret + 32 * pair, seed);
        acc += kva_xxh3_mix16(data + length - 16 * (pair + 1), kva_xxh3_secret + 32 * pair + 16, seed);
    }
    return kva_xxh3_avalanche(acc);
}

static uint64_t up_to_240(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t acc = length * KVA_XXH_PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        acc += kva_xxh3_mix16(data + 16 * i, kva_xxh3_secret + 16 * i, seed);
    acc = kva_xxh3_avalanche(acc);
    for (size_t i = 8; i < length / 16; i++)
        acc += kva_xxh3_mix16(data + 16 * i, kva_xxh3_secret + 16 * (i - 8) + KVA_XXH3_MID_START, seed);
    acc += kva_xxh3_mix16(data + length - 16, kva_xxh3_secret + KVA_XXH3_MID_END, seed);
    return kva_xxh3_avalanche(acc);
}

static inline void accumulate(uint64_t acc[8], const uint8_t *data, const uint8_t *key)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = kva_load64le(data + 8 * i);
        uint64_t keyed = value ^ kva_load64le(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xffffffffu) * (keyed >> 32);
    }
}

void kva_xxh3_accumulate(const kva_xxh3_key *seed_key, const uint8_t *data, size_t length, uint64_t acc[8])
{
    const uint64_t start[8] = {KVA_XXH_PRIME32_3, KVA_XXH_PRIME64_1, KVA_XXH_PRIME64_2, KVA_XXH_PRIME64_3,
                               KVA_XXH_PRIME64_4, KVA_XXH_PRIME32_2, KVA_XXH_PRIME64_5, KVA_XXH_PRIME32_1};
    const uint8_t *key = seed_key->secret, *last_stripe = data + length - STRIPE;
    size_t stripes = (length - 1) / STRIPE, in_block = 0;
    memcpy(acc, start, sizeof start);
    for (; stripes > 0; stripes--, data += STRIPE) {
        accumulate(acc, data, key + SECRET_STEP * in_block);
        if (++in_block == STRIPES_PER_BLOCK) {
            in_block = 0;
            for (int i = 0; i < 8; i++) {
                acc[i] ^= acc[i] >> 47 ^ kva_load64le(key + KVA_XXH3_SECRET - STRIPE + 8 * i);
                acc[i] *= KVA_XXH_PRIME32_1;
            }
        }
    }
    accumulate(acc, last_stripe, key + KVA_XXH3_SECRET - STRIPE - 7);
}

uint64_t kva_xxh3_merge(const uint64_t acc[8], const uint8_t *key, uint64_t start)
{
    for (int i = 0; i < 4; i++)
        start += kva_xxh3_fold_product(acc[2 * i] ^ kva_load64le(key + 16 * i),
                                       acc[2 * i + 1] ^ kva_load64le(key + 16 * i + 8));
    return kva_xxh3_avalanche(start);
}

static uint64_t over_240(const kva_xxh3_key *key, const uint8_t *data, size_t length)
{
    uint64_t acc[8];
    kva_xxh3_accumulate(key, data, length, acc);
    return kva_xxh3_merge(acc, key->secret + KVA_XXH3_MERGE_START, length * KVA_XXH_PRIME64_1);
}

void kva_xxh3_prepare(kva_xxh3_key *key, uint64_t seed)
{
    key->seed = seed;
    for (size_t at = 0; at < KVA_XXH3_SECRET; at += 16) {
        kva_store64le(key->secret + at, kva_load64le(kva_xxh3_secret + at) + seed);
        kva_store64le(key->secret + at + 8, kva_load64le(kva_xxh3_secret + at + 8) - seed);
    }
}

uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length)
{
    if (length <= 16)
        return up_to_16(data, length, key->seed);
    if (length <= 128)
        return up_to_128(data, length, key->seed);
    if (length <= 240)
        return up_to_240(data, length, key->seed);
    return over_240(key, data, length);
}
