/* XXH3, 64 bits, with a seed. */
#ifndef KVA_XXH3_H
#define KVA_XXH3_H

#include <stddef.h>
#include <stdint.h>

enum { KVA_XXH3_SECRET = 192 };

/* A seed made ready: messages over 240 bytes use a secret derived from it, which many messages share. */
typedef struct {
    uint64_t seed;
    uint8_t secret[KVA_XXH3_SECRET];
} kva_xxh3_key;

void kva_xxh3_prepare(kva_xxh3_key *key, uint64_t seed);

uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length);

#endif
