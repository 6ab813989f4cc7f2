/* Chains over canonical CBOR (vLLM, llm-d) and over pages of words (SGLang). */
#include "bytes.h"
#include "cbor.h"
#include "fnv1a.h"
#include "message.h"

static const uint8_t cbor_null[1] = {KVA_CBOR_NULL};

static uint8_t *append_extra_cbor(uint8_t *out, const kva_extra *extras, size_t block)
{
    if (extras && extras[block].data)
        return kva_append(out, extras[block].data, extras[block].length);
    return kva_append(out, cbor_null, sizeof cbor_null);
}

/* A message whose parent is still missing. */
typedef struct {
    uint8_t *start, *parent;
    size_t blocks;
} pending;

/* One block of one of the SHA-256 chains, written to a buffer with a gap for the parent. Returns 0 for a bad token. */
typedef int (*write_message)(const void *chain, size_t block, size_t parent_length, uint64_t *words, pending *message);

/* The chain itself. A block's message is written before the block in front of it is hashed: its stores have then long
   reached the cache when the hash loads them in other widths, and the writing fills the time that a chain of hashes,
   each waiting for the one before, leaves the processor idle. Only the 32 bytes of the parent come late. */
static kva_status chain_sha256(kva_sha256 sha256, const void *chain, write_message write, size_t blocks, size_t width,
                               size_t message_bytes, const uint8_t *parent, size_t parent_length, uint8_t *out)
{
    if (blocks == 0)
        return KVA_OK;
    uint64_t *words = message_bytes ? kva_block_buffer(width, 0, 2 * message_bytes) : NULL;
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *buffer = (uint8_t *)(words + width);
    pending now = {buffer, NULL, 0}, next = {buffer + message_bytes, NULL, 0};
    kva_status status = write(chain, 0, parent_length, words, &now) ? KVA_OK : KVA_BAD_TOKEN;
    for (size_t block = 0; block < blocks && status == KVA_OK; block++, out += KVA_SHA256_BYTES) {
        if (block + 1 < blocks && !write(chain, block + 1, KVA_SHA256_BYTES, words, &next))
            status = KVA_BAD_TOKEN;
        kva_append(now.parent, parent, parent_length);
        sha256(now.start, now.blocks, out);
        parent = out;
        parent_length = KVA_SHA256_BYTES;
        pending written = now;
        now = next;
        next = written;
    }
    free(words);
    return status;
}

static size_t longest_parent(size_t parent_length)
{
    return parent_length > KVA_SHA256_BYTES ? parent_length : KVA_SHA256_BYTES;
}

typedef struct {
    const kva_tokens *tokens;
    size_t block_size;
    const kva_extra *extras;
} cbor_chain;

/* [parent, [token ids], extra] with a gap for the parent, at `parent`. Returns the end, or NULL for a bad token. */
static uint8_t *cbor_message(const cbor_chain *chain, size_t block, size_t parent_length, uint64_t *words,
                             uint8_t *start, uint8_t **parent)
{
    if (!kva_tokens_widen(chain->tokens, block * chain->block_size, chain->block_size, words))
        return NULL;
    start[0] = KVA_CBOR_ARRAY | 3;
    *parent = kva_cbor_head(start + 1, KVA_CBOR_BYTES, parent_length);
    uint8_t *end = kva_cbor_head(*parent + parent_length, KVA_CBOR_ARRAY, chain->block_size);
    end = kva_cbor_uints(end, words, chain->block_size);
    return append_extra_cbor(end, chain->extras, block);
}

/* Room for any of a chain's messages; 0 when there is no such size. */
static size_t cbor_message_bytes(const cbor_chain *chain, size_t blocks, size_t parent_length)
{
    if (chain->block_size > SIZE_MAX / 64) /* the sum below must not wrap */
        return 0;
    return 1 + (2 + chain->block_size) * KVA_CBOR_HEAD_MAX + longest_parent(parent_length) +
           kva_longest_extra(chain->extras, blocks) + KVA_SHA256_PADDING_MAX + KVA_CBOR_SLACK;
}

static int write_cbor(const void *context, size_t block, size_t parent_length, uint64_t *words, pending *message)
{
    uint8_t *end = cbor_message(context, block, parent_length, words, message->start, &message->parent);
    if (end)
        message->blocks = kva_sha256_pad(message->start, (size_t)(end - message->start));
    return end != NULL;
}

kva_status kva_chain_sha256_cbor(kva_sha256 sha256, const kva_tokens *tokens, size_t block_size, const uint8_t *parent,
                                 size_t parent_length, const kva_extra *extras, uint8_t *out)
{
    size_t blocks = tokens->count / block_size;
    cbor_chain chain = {tokens, block_size, extras};
    size_t message_bytes = cbor_message_bytes(&chain, blocks, parent_length);
    return chain_sha256(sha256, &chain, write_cbor, blocks, block_size, message_bytes, parent, parent_length, out);
}

kva_status kva_chain_xxh3_128_cbor(const kva_tokens *tokens, size_t block_size, const uint8_t *parent,
                                   size_t parent_length, const kva_extra *extras, uint8_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    cbor_chain chain = {tokens, block_size, extras};
    size_t message_bytes = cbor_message_bytes(&chain, blocks, parent_length);
    uint64_t *words = message_bytes ? kva_block_buffer(block_size, 0, message_bytes) : NULL;
    if (!words)
        return KVA_NO_MEMORY;
    kva_xxh3_key key;
    kva_xxh3_prepare(&key, 0);
    uint8_t *message = (uint8_t *)(words + block_size), *gap = NULL, *end = message;
    for (size_t block = 0; block < blocks; block++, out += KVA_XXH3_128_BYTES) {
        end = cbor_message(&chain, block, parent_length, words, message, &gap);
        if (!end)
            break;
        kva_append(gap, parent, parent_length);
        kva_xxh3_128(&key, message, (size_t)(end - message), out);
        parent = out;
        parent_length = KVA_XXH3_128_BYTES;
    }
    free(words);
    return end ? KVA_OK : KVA_BAD_TOKEN;
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

typedef struct {
    const kva_tokens *tokens;
    size_t page_size, width;
    int bigram;
} page_chain;

static int write_page(const void *context, size_t page, size_t parent_length, uint64_t *words, pending *message)
{
    const page_chain *chain = context;
    if (!kva_tokens_widen(chain->tokens, page * chain->page_size, chain->width, words))
        return 0;
    message->parent = message->start;
    uint8_t *end = append_page(message->start + parent_length, words, chain->width, chain->bigram);
    message->blocks = kva_sha256_pad(message->start, (size_t)(end - message->start));
    return 1;
}

kva_status kva_chain_sha256_pages(kva_sha256 sha256, const kva_tokens *tokens, size_t page_size, int bigram,
                                  const uint8_t *parent, size_t parent_length, uint8_t *out)
{
    size_t pages = bigram ? kva_bigram_pages(tokens->count, page_size) : tokens->count / page_size;
    if (pages > 0 && page_size > SIZE_MAX / 64)
        return KVA_NO_MEMORY;
    page_chain chain = {tokens, page_size, page_size + (bigram ? 1 : 0), bigram};
    size_t message_bytes = longest_parent(parent_length) + 1 + 16 * page_size + KVA_SHA256_PADDING_MAX;
    return chain_sha256(sha256, &chain, write_page, pages, chain.width, message_bytes, parent, parent_length, out);
}

kva_status kva_chain_fnv1a_cbor(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                                uint64_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    uint64_t *words = kva_block_buffer(block_size, KVA_CBOR_HEAD_MAX,
                                   1 + 2 * KVA_CBOR_HEAD_MAX + kva_longest_extra(extras, blocks) + KVA_CBOR_SLACK);
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)(words + block_size);
    message[0] = KVA_CBOR_ARRAY | 3;
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks; block++) {
        if (kva_tokens_copy(tokens, block * block_size, block_size, words) >> 32) {
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
