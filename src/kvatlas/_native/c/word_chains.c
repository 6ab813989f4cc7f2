/* Hashes over 32-bit words: Dynamo's (XXH3-64) and llm-d's (XXH64). */
#include "message.h"
#include "xxh64.h"

/* The ids of a block as bytes of a message, at `out`, which is aligned for them. Returns 0 for a bad token. */
static inline int write_words(const kva_tokens *tokens, size_t first, size_t count, uint32_t *out)
{
    int good = kva_tokens_narrow(tokens, first, count, out);
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    for (size_t i = 0; i < count; i++)
        kva_store32le((uint8_t *)(out + i), out[i]);
#endif
    return good;
}

static inline uint8_t *append_extra(uint8_t *out, const kva_extra *extras, size_t block)
{
    return extras && extras[block].data ? kva_append(out, extras[block].data, extras[block].length) : out;
}

kva_status kva_xxh3_blocks(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, size_t overlap,
                           const kva_extra *extras, uint64_t *out)
{
    size_t blocks = tokens->count < overlap ? 0 : (tokens->count - overlap) / block_size;
    if (blocks == 0)
        return KVA_OK;
    size_t window = block_size + overlap;
    uint64_t *buffer = kva_block_buffer(window, 0, kva_longest_extra(extras, blocks));
    if (!buffer)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)buffer;
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks && status == KVA_OK; block++) {
        if (!write_words(tokens, block * block_size, window, (uint32_t *)(void *)message))
            status = KVA_BAD_TOKEN;
        uint8_t *end = append_extra(message + window * sizeof(uint32_t), extras, block);
        out[block] = kva_xxh3_64(key, message, (size_t)(end - message));
    }
    free(buffer);
    return status;
}

void kva_chain_xxh3_pairs(const kva_xxh3_key *key, const uint64_t *hashes, size_t count, const uint64_t *parent,
                          uint64_t *out)
{
    for (size_t i = 0; i < count; parent = out + i++) {
        uint8_t pair[16];
        if (!parent) {
            out[i] = hashes[i];
            continue;
        }
        kva_store64le(pair, *parent);
        kva_store64le(pair + 8, hashes[i]);
        out[i] = kva_xxh3_64(key, pair, sizeof pair);
    }
}

kva_status kva_chain_xxh64(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                           uint64_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    uint64_t *buffer = kva_block_buffer(block_size, 0, sizeof parent + kva_longest_extra(extras, blocks));
    if (!buffer)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)buffer, *words = message + sizeof parent;
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks && status == KVA_OK; block++) {
        if (!write_words(tokens, block * block_size, block_size, (uint32_t *)(void *)words))
            status = KVA_BAD_TOKEN;
        kva_store64le(message, parent);
        uint8_t *end = append_extra(words + block_size * sizeof(uint32_t), extras, block);
        parent = out[block] = kva_xxh64(message, (size_t)(end - message), 0);
    }
    free(buffer);
    return status;
}
