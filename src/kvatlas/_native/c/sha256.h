/* SHA-256 (FIPS 180-4) of messages that are whole in memory, with the processor's own instructions where it has them. */
#ifndef KVA_SHA256_H
#define KVA_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { KVA_SHA256_BYTES = 32, KVA_SHA256_BLOCK = 64, KVA_SHA256_PADDING_MAX = 72 };

/* Digest of `blocks` 64-byte blocks that are padded already. */
typedef void (*kva_sha256)(const uint8_t *padded, size_t blocks, uint8_t digest[KVA_SHA256_BYTES]);

void kva_sha256_portable(const uint8_t *padded, size_t blocks, uint8_t digest[KVA_SHA256_BYTES]);

/* The fastest one this processor runs, and its name ("sha-ni", "armv8" or "portable"). */
kva_sha256 kva_sha256_best(const char **name);

/* Write the padding behind message[0..length), at most KVA_SHA256_PADDING_MAX bytes. Returns the number of blocks. */
size_t kva_sha256_pad(uint8_t *message, size_t length);

#endif
