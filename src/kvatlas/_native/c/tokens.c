#include "tokens.h"

/* A bad id has its top bit set once it is widened with its sign, whatever the kind: one OR over all finds it, and the
   loop stays free of branches, so that it is vectorised. */
#define WIDEN(type, wide)                                       \
    do {                                                        \
        const type *from = (const type *)tokens->data + first;  \
        for (size_t i = 0; i < count; i++) {                    \
            uint64_t word = (uint64_t)(wide)from[i];            \
            seen |= word;                                       \
            words[i] = word;                                    \
        }                                                       \
    } while (0)

#define CHECK(type, wide)                                       \
    do {                                                        \
        const type *from = (const type *)tokens->data;          \
        for (size_t i = 0; i < tokens->count; i++)              \
            seen |= (uint64_t)(wide)from[i];                    \
    } while (0)

int kva_tokens_widen(const kva_tokens *tokens, size_t first, size_t count, uint64_t *words)
{
    uint64_t seen = 0;
    switch (tokens->kind) {
    case KVA_I32: WIDEN(int32_t, int64_t); break;
    case KVA_U32: WIDEN(uint32_t, uint64_t); break;
    case KVA_I64: WIDEN(int64_t, int64_t); break;
    case KVA_U64: WIDEN(uint64_t, uint64_t); break;
    }
    return !(seen >> 63);
}

int kva_tokens_valid(const kva_tokens *tokens)
{
    uint64_t seen = 0;
    switch (tokens->kind) {
    case KVA_I32: CHECK(int32_t, int64_t); break;
    case KVA_U32: return 1;
    case KVA_I64: CHECK(int64_t, int64_t); break;
    case KVA_U64: CHECK(uint64_t, uint64_t); break;
    }
    return !(seen >> 63);
}
