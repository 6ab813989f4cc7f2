/* Buffers in which the messages of a chain are put together. */
#ifndef KVA_MESSAGE_H
#define KVA_MESSAGE_H

#include "chain.h"

#include <stdlib.h>
#include <string.h>

/* Room for the largest extra; never 0. */
static inline size_t kva_longest_extra(const kva_extra *extras, size_t blocks)
{
    size_t longest = 1;
    for (size_t i = 0; extras && i < blocks; i++)
        if (extras[i].length > longest)
            longest = extras[i].length;
    return longest;
}

static inline uint8_t *kva_append(uint8_t *out, const void *data, size_t length)
{
    if (length == KVA_SHA256_BYTES) /* the parent, of every block but the first: two moves */
        memcpy(out, data, KVA_SHA256_BYTES);
    else if (length > 0)
        memcpy(out, data, length);
    return out + length;
}

/* One allocation: the words of a block, then its message. NULL when there is no memory or the size does not fit. */
static inline uint64_t *kva_block_buffer(size_t words, size_t bytes_per_word, size_t fixed_bytes)
{
    if (words > (SIZE_MAX / 2 - fixed_bytes) / (sizeof(uint64_t) + bytes_per_word))
        return NULL;
    return malloc(words * (sizeof(uint64_t) + bytes_per_word) + fixed_bytes);
}

#endif
