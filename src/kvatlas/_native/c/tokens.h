/* Token ids as their owner holds them: 4 or 8 bytes each, signed or not, read block by block without a copy of the whole. */
#ifndef KVA_TOKENS_H
#define KVA_TOKENS_H

#include <stddef.h>
#include <stdint.h>

typedef enum { KVA_I32, KVA_U32, KVA_I64, KVA_U64 } kva_token_kind;

typedef struct {
    const void *data; /* aligned for its kind; not read when count is 0 */
    size_t count;
    kva_token_kind kind;
} kva_tokens;

/* Copy `count` ids from `first` on into 64-bit words. Returns 0 when one is negative or above 2^63 - 1, else 1. */
int kva_tokens_widen(const kva_tokens *tokens, size_t first, size_t count, uint64_t *words);

/* 1 when every id is in 0..2^63-1. */
int kva_tokens_valid(const kva_tokens *tokens);

#endif
