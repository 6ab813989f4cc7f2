/* The chain of kvatlas's own block keys: XXH3-64 over "B", parent, number of tokens, tokens, and an extra. */
#include "message.h"
#include "xxh3_parts.h"

enum {
    HEAD = 13, /* bytes before the tokens */
    /* Block sizes whose messages without an extra have 129 to 240 bytes. */
    IN_REGISTERS_MIN = 15,
    IN_REGISTERS_MAX = 28,
    CHUNK = 128 /* tokens widened before they are hashed */
};

/* Eight bytes of a message across two words: its words lie 13 bytes off, so its reader meets the last five bytes of one
   and the first three of the next. */
static inline uint64_t across(const uint64_t *words, size_t index)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return kva_load64le((const uint8_t *)(words + index) + 3);
#else
    return words[index] >> 24 | words[index + 1] << 40;
#endif
}

/* The key of a block of IN_REGISTERS_MIN to IN_REGISTERS_MAX words.

   As XXH3 reads 129 to 240 bytes, but no message is put together: the widened words are read where they are, at the
   offsets they would have in it. The parent, known last, is used last. */
static inline uint64_t key_in_registers(const kva_xxh3_key *key, const uint64_t *words, size_t count, uint64_t parent)
{
    size_t length = HEAD + 8 * count;
    uint64_t sum = length * KVA_XXH_PRIME64_1, end = 0;
    for (size_t i = 1; i < 8; i++) /* the derived secret has the seed in it already */
        sum += kva_xxh3_mix(across(words, 2 * i - 2), across(words, 2 * i - 1), key->secret + 16 * i, 0);
    for (size_t i = 8; i < length / 16; i++)
        end += kva_xxh3_mix(across(words, 2 * i - 2), across(words, 2 * i - 1),
                            kva_xxh3_secret + 16 * (i - 8) + KVA_XXH3_MID_START, key->seed);
    end += kva_xxh3_mix(words[count - 2], words[count - 1], kva_xxh3_secret + KVA_XXH3_MID_END, key->seed);
    uint64_t first = 'B' | parent << 8;
    uint64_t second = parent >> 56 | (uint64_t)count << 8 | words[0] << 40;
    return kva_xxh3_avalanche(kva_xxh3_avalanche(sum + kva_xxh3_mix(first, second, key->secret, 0)) + end);
}

/* Blocks are widened some at a time: by when a block is read, eight bytes across two words, its stores have mostly left
   the store buffer, from which no such load is served. */
static inline kva_status chain_in_registers(const kva_tokens *tokens, size_t block_size, uint64_t parent,
                                            const kva_xxh3_key *key, uint64_t *out)
{
    uint64_t words[CHUNK];
    size_t blocks = tokens->count / block_size, at_once = CHUNK / block_size;
    for (size_t block = 0; block < blocks; block += at_once) {
        size_t now = blocks - block < at_once ? blocks - block : at_once;
        if (!kva_tokens_widen(tokens, block * block_size, now * block_size, words))
            return KVA_BAD_TOKEN;
        for (size_t i = 0; i < now; i++)
            parent = out[block + i] = key_in_registers(key, words + i * block_size, block_size, parent);
    }
    return KVA_OK;
}

kva_status kva_block_keys(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, uint64_t parent,
                          const kva_extra *extras, uint64_t *out)
{
    size_t blocks = tokens->count / block_size;
    if (blocks == 0)
        return KVA_OK;
    if (!extras && block_size == 16) /* told apart so that the compiler unrolls for the usual size */
        return chain_in_registers(tokens, 16, parent, key, out);
    if (!extras && block_size >= IN_REGISTERS_MIN && block_size <= IN_REGISTERS_MAX)
        return chain_in_registers(tokens, block_size, parent, key, out);
    uint64_t *words = kva_block_buffer(block_size, sizeof(uint64_t), HEAD + kva_longest_extra(extras, blocks));
    if (!words)
        return KVA_NO_MEMORY;
    uint8_t *message = (uint8_t *)(words + block_size);
    message[0] = 'B';
    kva_store32le(message + 9, (uint32_t)block_size);
    kva_status status = KVA_OK;
    for (size_t block = 0; block < blocks; block++) {
        if (!kva_tokens_widen(tokens, block * block_size, block_size, words)) {
            status = KVA_BAD_TOKEN;
            break;
        }
        kva_store64le(message + 1, parent);
        kva_store_words64le(message + HEAD, words, block_size);
        uint8_t *end = message + HEAD + block_size * sizeof(uint64_t);
        if (extras && extras[block].data)
            end = kva_append(end, extras[block].data, extras[block].length);
        parent = out[block] = kva_xxh3_64(key, message, (size_t)(end - message));
    }
    free(words);
    return status;
}

kva_status kva_chain_xxh3(const kva_tokens *tokens, size_t block_size, uint64_t parent, uint64_t seed,
                          const kva_extra *extras, uint64_t *out)
{
    kva_xxh3_key key;
    kva_xxh3_prepare(&key, seed);
    return kva_block_keys(&key, tokens, block_size, parent, extras, out);
}
