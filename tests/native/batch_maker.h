/* Writes random event batches as engines send them, with every encoding of each item, for the drivers of this folder. */
#ifndef BATCH_MAKER_H
#define BATCH_MAKER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAKER_ROOM = 1 << 16, MAKER_TOKENS = 300, MAKER_HASHES = 20 };

typedef struct {
    uint8_t bytes[MAKER_ROOM];
    size_t length;
    uint64_t state; /* of the random numbers; not 0 */
} maker;

static inline uint64_t make_random(maker *m, uint64_t below)
{
    m->state ^= m->state << 13;
    m->state ^= m->state >> 7;
    m->state ^= m->state << 17;
    return (m->state >> 11) % below;
}

static inline void put(maker *m, uint64_t byte)
{
    if (m->length < MAKER_ROOM)
        m->bytes[m->length++] = (uint8_t)byte;
}

static inline void put_head(maker *m, uint64_t head, size_t width, uint64_t argument)
{
    put(m, head);
    for (size_t i = width; i-- > 0;)
        put(m, argument >> 8 * i);
}

/* In the shortest form, or now and then in a longer one. */
static inline void put_uint(maker *m, uint64_t value)
{
    static const unsigned heads[] = {0xcc, 0xcd, 0xce, 0xcf};
    size_t form = value < 0x80 ? 0 : value < 0x100 ? 1 : value < 0x10000 ? 2 : value >> 32 == 0 ? 3 : 4;
    if (make_random(m, 40) == 0)
        form += make_random(m, 5 - form);
    if (form == 0)
        put(m, value);
    else if (make_random(m, 200) == 0 && !(value >> 63)) /* a signed form, wide enough */
        put_head(m, 0xd3, 8, value);
    else
        put_head(m, heads[form - 1], (size_t)1 << (form - 1), value);
}

static inline void put_text(maker *m, const char *text)
{
    size_t length = strlen(text);
    if (length < 32 && make_random(m, 30))
        put(m, 0xa0 | length);
    else
        put_head(m, 0xd9, 1, length);
    for (size_t i = 0; i < length; i++)
        put(m, (uint8_t)text[i]);
}

static inline void put_array(maker *m, size_t count)
{
    if (count < 16 && make_random(m, 30))
        put(m, 0x90 | count);
    else
        put_head(m, 0xdc, 2, count);
}

static inline void put_hash(maker *m, int as_bytes)
{
    if (!as_bytes) {
        uint64_t high = make_random(m, UINT64_C(1) << 32);
        put_head(m, make_random(m, 2) ? 0xcf : 0xd3, 8, high << 32 | make_random(m, UINT64_C(1) << 32));
        return;
    }
    size_t length = make_random(m, 8) ? 32 : 1 + (size_t)make_random(m, 64);
    put_head(m, 0xc4, 1, length);
    for (size_t i = 0; i < length; i++)
        put(m, make_random(m, 256));
}

static inline void put_hashes(maker *m, size_t count, int as_bytes)
{
    put_array(m, count);
    for (size_t i = 0; i < count; i++)
        put_hash(m, as_bytes);
}

static inline void put_tokens(maker *m, uint64_t *tokens, size_t count)
{
    static const uint64_t vocabularies[] = {100, 200, 60000, 128000, UINT64_C(1) << 33};
    uint64_t vocabulary = vocabularies[make_random(m, 5)];
    put_array(m, count);
    for (size_t i = 0; i < count; i++) {
        tokens[i] = make_random(m, vocabulary);
        put_uint(m, tokens[i]);
    }
}

/* A name before the value in a map; nothing in an array. */
static inline void put_key(maker *m, int is_map, const char *name)
{
    if (is_map)
        put_text(m, name);
}

typedef struct {
    int stored;
    size_t hash_count, token_count;
    uint64_t tokens[MAKER_TOKENS], block_size;
} made_event;

/* One event that the scanner has to take. */
static inline void put_event(maker *m, made_event *made)
{
    int is_map = make_random(m, 4) != 0, as_bytes = make_random(m, 2) != 0, with_keys = make_random(m, 2) != 0;
    memset(made, 0, sizeof *made);
    made->stored = make_random(m, 3) != 0;
    made->hash_count = (size_t)make_random(m, MAKER_HASHES);
    size_t fields = made->stored ? (with_keys ? 9 : 8) : 3;
    put(m, (is_map ? 0x80 : 0x90) | fields);
    put_key(m, is_map, "type");
    put_text(m, made->stored ? "BlockStored" : "BlockRemoved");
    put_key(m, is_map, "block_hashes");
    put_hashes(m, made->hash_count, as_bytes);
    if (made->stored) {
        put_key(m, is_map, "parent_block_hash");
        if (make_random(m, 2))
            put(m, 0xc0);
        else
            put_hash(m, as_bytes);
        put_key(m, is_map, "token_ids");
        made->token_count = (size_t)make_random(m, MAKER_TOKENS);
        put_tokens(m, made->tokens, made->token_count);
        put_key(m, is_map, "block_size");
        made->block_size = make_random(m, 70000);
        put_uint(m, made->block_size);
        put_key(m, is_map, "lora_id");
        put(m, make_random(m, 2) ? 0xc0 : 7);
    }
    put_key(m, is_map, "medium");
    put_text(m, make_random(m, 2) ? "GPU" : "CPU_PINNED");
    if (made->stored) {
        put_key(m, is_map, "lora_name");
        put(m, 0xc0);
    }
    if (made->stored && with_keys) {
        put_key(m, is_map, "extra_keys");
        put_array(m, made->hash_count);
        for (size_t i = 0; i < made->hash_count; i++)
            put(m, 0xc0);
    }
}

/* A batch of `count` events. */
static inline void make_batch(maker *m, made_event *made, size_t count)
{
    m->length = 0;
    put(m, 0x93);
    put_head(m, 0xcb, 8, UINT64_C(0x41da000000000000) + make_random(m, 1000));
    put_array(m, count);
    for (size_t i = 0; i < count; i++)
        put_event(m, made + i);
    put(m, make_random(m, 2) ? 0xc0 : 3);
}

#endif
