/* Chained hashes of blocks of token ids: each block's hash goes into the next one's bytes.

   Every function hashes the complete blocks of `tokens` in order and leaves a tail that fills no block out; `out` has
   room for all of them. `extras` is NULL, or one entry for each block; an entry without data stands for none. */
#ifndef KVA_CHAIN_H
#define KVA_CHAIN_H

#include "sha256.h"
#include "tokens.h"
#include "xxh3.h"

typedef enum { KVA_OK, KVA_BAD_TOKEN, KVA_NO_MEMORY } kva_status;

typedef struct {
    const uint8_t *data; /* NULL: this block has none */
    size_t length;
} kva_extra;

/* SHA-256 over canonical CBOR of [parent bytes, [token ids], extra]; `extra` is CBOR already, null when there is none.
   out: 32 bytes for each block. */
kva_status kva_chain_sha256_cbor(kva_sha256 sha256, const kva_tokens *tokens, size_t block_size,
                                 const uint8_t *parent, size_t parent_length, const kva_extra *extras, uint8_t *out);

/* SHA-256 over parent and the ids of a page: 4 bytes little-endian each, or 0xff and 8 bytes each when one of the page
   needs more than 32 bits. With `bigram` a page of n pairs is the words t0 t1 t1 t2 .. of n + 1 tokens. */
kva_status kva_chain_sha256_pages(kva_sha256 sha256, const kva_tokens *tokens, size_t page_size, int bigram,
                                  const uint8_t *parent, size_t parent_length, uint8_t *out);

/* kvatlas's own block keys: XXH3-64 over "B", parent (8 bytes), number of token ids (4), token ids (8 each), all
   little-endian, and the extra. The key of the seed is the caller's, who prepares it once for many short chains. */
kva_status kva_block_keys(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, uint64_t parent,
                          const kva_extra *extras, uint64_t *out);

/* The same from a seed. */
kva_status kva_chain_xxh3(const kva_tokens *tokens, size_t block_size, uint64_t parent, uint64_t seed,
                          const kva_extra *extras, uint64_t *out);

/* XXH3-128 over the CBOR of kva_chain_sha256_cbor. out: 16 bytes for each block. */
kva_status kva_chain_xxh3_128_cbor(const kva_tokens *tokens, size_t block_size, const uint8_t *parent,
                                   size_t parent_length, const kva_extra *extras, uint8_t *out);

/* FNV-1a-64 over canonical CBOR of [parent, [token ids], extra], ids up to 2^32-1. */
kva_status kva_chain_fnv1a_cbor(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                                uint64_t *out);

/* XXH3-64 of each block alone: its ids, 4 bytes little-endian each, with the first `overlap` of the next block, and the
   extra. Blocks are complete when their overlap is there too. Ids up to 2^32-1. */
kva_status kva_xxh3_blocks(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, size_t overlap,
                           const kva_extra *extras, uint64_t *out);

/* XXH3-64 over parent and hash, 8 bytes little-endian each, with the first hash unchanged when there is no parent. */
void kva_chain_xxh3_pairs(const kva_xxh3_key *key, const uint64_t *hashes, size_t count, const uint64_t *parent,
                          uint64_t *out);

/* XXH64 (seed 0) over parent (8 bytes), ids (4 each), all little-endian, and the extra. Ids up to 2^32-1. */
kva_status kva_chain_xxh64(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                           uint64_t *out);

/* Complete pages of a bigram sequence: n tokens are n - 1 pairs. */
static inline size_t kva_bigram_pages(size_t count, size_t page_size)
{
    return count ? (count - 1) / page_size : 0;
}

#endif
