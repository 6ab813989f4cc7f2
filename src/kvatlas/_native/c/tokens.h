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

/* A bad id has its top bit set once it is widened with its sign, whatever the kind: one OR over all finds it, and the
   loop stays free of branches, so that it is vectorised. */
#define KVA_WIDEN(type, wide)                                       \
    do {                                                        \
        const type *from = (const type *)tokens->data + first;  \
        for (size_t i = 0; i < count; i++) {                    \
            uint64_t word = (uint64_t)(wide)from[i];            \
            seen |= word;                                       \
            words[i] = word;                                    \
        }                                                       \
    } while (0)

#define KVA_CHECK(type, wide)                                       \
    do {                                                        \
        const type *from = (const type *)tokens->data;          \
        for (size_t i = 0; i < tokens->count; i++)              \
            seen |= (uint64_t)(wide)from[i];                    \
    } while (0)

#define KVA_NARROW(type, wide)                                  \
    do {                                                        \
        const type *from = (const type *)tokens->data + first;  \
        for (size_t i = 0; i < count; i++) {                    \
            seen |= (uint64_t)(wide)from[i];                    \
            words[i] = (uint32_t)from[i];                       \
        }                                                       \
    } while (0)

/* Copy `count` ids from `first` on into 64-bit words. Returns the OR of them. */
static inline uint64_t kva_tokens_copy(const kva_tokens *tokens, size_t first, size_t count, uint64_t *words)
{
    uint64_t seen = 0;
    switch (tokens->kind) {
    case KVA_I32: KVA_WIDEN(int32_t, int64_t); break;
    case KVA_U32: KVA_WIDEN(uint32_t, uint64_t); break;
    case KVA_I64: KVA_WIDEN(int64_t, int64_t); break;
    case KVA_U64: KVA_WIDEN(uint64_t, uint64_t); break;
    }
    return seen;
}

/* The same for ids up to 2^63 - 1. Returns 0 when one is negative or above, else 1. */
static inline int kva_tokens_widen(const kva_tokens *tokens, size_t first, size_t count, uint64_t *words)
{
    return !(kva_tokens_copy(tokens, first, count, words) >> 63);
}

/* Copy `count` ids from `first` on into 32-bit words. Returns 0 when one is negative or above 2^32 - 1, else 1. */
static inline int kva_tokens_narrow(const kva_tokens *tokens, size_t first, size_t count, uint32_t *words)
{
    uint64_t seen = 0;
    switch (tokens->kind) {
    case KVA_I32: KVA_NARROW(int32_t, int64_t); break;
    case KVA_U32: KVA_NARROW(uint32_t, uint64_t); break;
    case KVA_I64: KVA_NARROW(int64_t, int64_t); break;
    case KVA_U64: KVA_NARROW(uint64_t, uint64_t); break;
    }
    return !(seen >> 32);
}

/* 1 when every id has at most `bits` bits, 32 or 63. */
static inline int kva_tokens_fit(const kva_tokens *tokens, int bits)
{
    uint64_t seen = 0;
    switch (tokens->kind) {
    case KVA_I32: KVA_CHECK(int32_t, int64_t); break;
    case KVA_U32: return 1;
    case KVA_I64: KVA_CHECK(int64_t, int64_t); break;
    case KVA_U64: KVA_CHECK(uint64_t, uint64_t); break;
    }
    return !(seen >> bits);
}

/* 1 when every id is in 0..2^63-1. */
static inline int kva_tokens_valid(const kva_tokens *tokens)
{
    return kva_tokens_fit(tokens, 63);
}

#undef KVA_WIDEN
#undef KVA_NARROW
#undef KVA_CHECK

#endif
