/* XXH3, 64 and 128 bits, with a seed. */
#ifndef KVA_XXH3_H
#define KVA_XXH3_H

#include <stddef.h>
#include <stdint.h>

enum { KVA_XXH3_SECRET = 192, KVA_XXH3_128_BYTES = 16 };

/* A seed made ready: messages over 240 bytes use a secret derived from it, which many messages share. */
typedef struct {
    uint64_t seed;
    uint8_t secret[KVA_XXH3_SECRET];
} kva_xxh3_key;

void kva_xxh3_prepare(kva_xxh3_key *key, uint64_t seed);

uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length);

/* The digest in its canonical form: 16 bytes, most significant first. */
void kva_xxh3_128(const kva_xxh3_key *key, const uint8_t *data, size_t length, uint8_t digest[KVA_XXH3_128_BYTES]);

#endif
