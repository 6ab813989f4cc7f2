/* SHA-256 (FIPS 180-4) of messages that are whole in memory, with the processor's own instructions where it has them. */
#ifndef KVA_SHA256_H
#define KVA_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { KVA_SHA256_BYTES = 32, KVA_SHA256_BLOCK = 64, KVA_SHA256_PADDING_MAX = 72 };

/* Fold `blocks` 64-byte blocks into the state. */
typedef void (*kva_sha256_compress)(uint32_t state[8], const uint8_t *data, size_t blocks);

void kva_sha256_portable(uint32_t state[8], const uint8_t *data, size_t blocks);

/* The fastest one this processor runs, and its name ("sha-ni" or "portable"). */
kva_sha256_compress kva_sha256_best(const char **name);

/* Digest of message[0..length). The padding is written behind it: there must be room for KVA_SHA256_PADDING_MAX bytes. */
void kva_sha256_in_place(kva_sha256_compress compress, uint8_t *message, size_t length, uint8_t digest[32]);

#endif
