#include "chain.h"

#include "bytes.h"
#include "cbor.h"
#include "fnv1a.h"
#include "xxh3.h"

#include <stdlib.h>
#include <string.h>

static const uint8_t cbor_null[1] = {KVA_CBOR_NULL};

static size_t longest_extra(const kva_extra *extras, size_t blocks)
{
    size_t longest = sizeof cbor_null;
    for (size_t i = 0; extras && i < blocks; i++)
        if (extras[i].length > longest)
            longest = extras[i].length;
    return longest;
}

static uint8_t *append(uint8_t *out, const void *data, size_t length)
{
    if (length > 0)
        memcpy(out, data, length);
    return out + length;
}

static uint8_t *append_extra_cbor(uint8_t *out, const kva_extra *extras, size_t block)
{
    if (extras && extras[block].data)
        return append(out, extras[block].data, extras[block].length);
    return append(out, cbor_null, sizeof cbor_null);
}

/* One allocation: the words of a block, then its message. NULL when there is no memory or the size does not fit. */
static uint64_t *block_buffer(size_t words, size_t bytes_per_word, size_t fixed_bytes)
{
    if (words > (SIZE_MAX / 2 - fixed_bytes) / (sizeof(uint64_t) + bytes_per_word))
        return NULL;
    return malloc(words * (sizeof(uint64_t) + bytes_per_word) + fixed_bytes);
}

kva_status kva_chain_sha256_cbor(kva_sha256_compress compress, const kva_tokens *tokens, size_t block_size,
                                 const uint8_t *parent, size_t parent_length, const kva_extra *extras, uint8_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    size_t longest_parent = parent_length > KVA_SHA256_BYTES ? parent_length : KVA_SHA256_BYTES;
    uint64_t *words = block_buffer(block_size, KVA_CBOR_HEAD_MAX,
                                   1 + 2 * KVA_CBOR_HEAD_MAX + longest_parent + longest_extra(extras, blocks) +
                                       KVA_SHA256_PADDING_MAX + KVA_CBOR_SLACK);
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)(words + block_size);
    message[0] = KVA_CBOR_ARRAY | 3;
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks; block++, out += KVA_SHA256_BYTES) {
        if (!kva_tokens_widen(tokens, block * block_size, block_size, words)) {
            status = KVA_BAD_TOKEN;
            break;
        }
        uint8_t *end = kva_cbor_head(message + 1, KVA_CBOR_BYTES, parent_length);
        end = append(end, parent, parent_length);
        end = kva_cbor_head(end, KVA_CBOR_ARRAY, block_size);
        end = kva_cbor_uints(end, words, block_size);
        end = append_extra_cbor(end, extras, block);
        kva_sha256_in_place(compress, message, (size_t)(end - message), out);
        parent = out;
        parent_length = KVA_SHA256_BYTES;
    }
    free(words);
    return status;
}

/* The ids of one page as they are hashed; returns the end. */
static uint8_t *append_page(uint8_t *out, const uint64_t *words, size_t count, int bigram)
{
    uint64_t seen = 0;
    for (size_t i = 0; i < count; i++)
        seen |= words[i];
    size_t repeats = bigram ? 2 : 1, pieces = bigram ? count - 1 : count;
    if (seen >> 32) {
        *out++ = 0xff;
        for (size_t i = 0; i < pieces; i++)
            for (size_t j = 0; j < repeats; j++, out += 8)
                kva_store64le(out, words[i + j]);
    } else {
        for (size_t i = 0; i < pieces; i++)
            for (size_t j = 0; j < repeats; j++, out += 4)
                kva_store32le(out, (uint32_t)words[i + j]);
    }
    return out;
}

kva_status kva_chain_sha256_pages(kva_sha256_compress compress, const kva_tokens *tokens, size_t page_size, int bigram,
                                  const uint8_t *parent, size_t parent_length, uint8_t *out)
{
    size_t pages = bigram ? kva_bigram_pages(tokens->count, page_size) : tokens->count / page_size;
    if (pages == 0)
        return KVA_OK;
    size_t width = page_size + (bigram ? 1 : 0); /* no overflow: page_size <= count */
    size_t longest_parent = parent_length > KVA_SHA256_BYTES ? parent_length : KVA_SHA256_BYTES;
    uint64_t *words = block_buffer(width, 16, longest_parent + 1 + KVA_SHA256_PADDING_MAX);
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)(words + width);
    kva_status status = KVA_OK;
    for (size_t page = 0; page < pages; page++, out += KVA_SHA256_BYTES) {
        if (!kva_tokens_widen(tokens, page * page_size, width, words)) {
            status = KVA_BAD_TOKEN;
            break;
        }
        uint8_t *end = append(message, parent, parent_length);
        end = append_page(end, words, width, bigram);
        kva_sha256_in_place(compress, message, (size_t)(end - message), out);
        parent = out;
        parent_length = KVA_SHA256_BYTES;
    }
    free(words);
    return status;
}

/* The head has 13 bytes; it starts 3 bytes into the buffer, so that the ids behind it are aligned and can be widened
   right where they are hashed. */
enum { XXH3_SHIFT = 3, XXH3_HEAD = 13 };

kva_status kva_chain_xxh3(const kva_tokens *tokens, size_t block_size, uint64_t parent, uint64_t seed,
                          const kva_extra *extras, uint64_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    uint64_t *buffer = block_buffer(block_size, 0, XXH3_SHIFT + XXH3_HEAD + longest_extra(extras, blocks));
    if (!buffer)
        return KVA_NO_MEMORY;
    uint64_t *words = buffer + (XXH3_SHIFT + XXH3_HEAD) / sizeof(uint64_t);
    uint8_t *message = (uint8_t *)buffer + XXH3_SHIFT;
    message[0] = 'B';
    kva_store32le(message + 9, (uint32_t)block_size);
    kva_xxh3_key key;
    kva_xxh3_prepare(&key, seed);
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks; block++) {
        if (!kva_tokens_widen(tokens, block * block_size, block_size, words)) {
            status = KVA_BAD_TOKEN;
            break;
        }
        for (size_t i = 0; i < block_size; i++) /* nothing to do on little-endian machines, and compiled to nothing */
            kva_store64le((uint8_t *)(words + i), words[i]);
        kva_store64le(message + 1, parent);
        uint8_t *end = (uint8_t *)(words + block_size);
        if (extras && extras[block].data)
            end = append(end, extras[block].data, extras[block].length);
        parent = out[block] = kva_xxh3_64(&key, message, (size_t)(end - message));
    }
    free(buffer);
    return status;
}

kva_status kva_chain_fnv1a_cbor(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                                uint64_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    uint64_t *words = block_buffer(block_size, KVA_CBOR_HEAD_MAX,
                                   1 + 2 * KVA_CBOR_HEAD_MAX + longest_extra(extras, blocks) + KVA_CBOR_SLACK);
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)(words + block_size);
    message[0] = KVA_CBOR_ARRAY | 3;
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks; block++) {
        if (!kva_tokens_widen(tokens, block * block_size, block_size, words)) {
            status = KVA_BAD_TOKEN;
            break;
        }
        uint8_t *end = kva_cbor_head(message + 1, KVA_CBOR_UINT, parent);
        end = kva_cbor_head(end, KVA_CBOR_ARRAY, block_size);
        end = kva_cbor_uints(end, words, block_size);
        end = append_extra_cbor(end, extras, block);
        parent = out[block] = kva_fnv1a_64(message, (size_t)(end - message), KVA_FNV1A_BASIS);
    }
    free(words);
    return status;
}
