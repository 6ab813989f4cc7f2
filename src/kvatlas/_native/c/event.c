#include "event.h"

#include <string.h>

/* The fields of all events. Locality, ownership and session are checked and not kept: an index has no use for them. */
typedef enum {
    HASHES,
    PARENT,
    TOKENS,
    BLOCK_SIZE,
    LORA_ID,
    MEDIUM,
    LORA_NAME,
    EXTRA_KEYS,
    GROUP,
    SPEC_KIND,
    WINDOW,
    LOCALITY,
    OWNERSHIP,
    SESSION_ID,
    CACHE_SALT
} field;

typedef struct {
    const char *name;
    size_t length;
    field field;
} named_field;

#define NAMED(name, field) {name, sizeof name - 1, field}

/* In the order of the wire, which is also that of the older array form. Source: kvatlas.events.model. */
static const named_field stored_fields[] = {
    NAMED("block_hashes", HASHES),
    NAMED("parent_block_hash", PARENT),
    NAMED("token_ids", TOKENS),
    NAMED("block_size", BLOCK_SIZE),
    NAMED("lora_id", LORA_ID),
    NAMED("medium", MEDIUM),
    NAMED("lora_name", LORA_NAME),
    NAMED("extra_keys", EXTRA_KEYS),
    NAMED("group_idx", GROUP),
    NAMED("kv_cache_spec_kind", SPEC_KIND),
    NAMED("kv_cache_spec_sliding_window", WINDOW),
    NAMED("locality", LOCALITY),
    NAMED("ownership", OWNERSHIP),
    NAMED("session_id", SESSION_ID),
    NAMED("cache_salt", CACHE_SALT),
};
static const named_field removed_fields[] = {
    NAMED("block_hashes", HASHES), NAMED("medium", MEDIUM),       NAMED("group_idx", GROUP),
    NAMED("locality", LOCALITY),   NAMED("ownership", OWNERSHIP),
};

typedef struct {
    kva_event_kind kind;
    const named_field *fields;
    size_t count;
    uint32_t required; /* one bit a field */
} event_schema;

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const event_schema stored_schema = {KVA_EVENT_STORED, stored_fields, COUNT(stored_fields),
                                           1u << HASHES | 1u << PARENT | 1u << TOKENS | 1u << BLOCK_SIZE};
static const event_schema removed_schema = {KVA_EVENT_REMOVED, removed_fields, COUNT(removed_fields), 1u << HASHES};

/* What is read of an event besides its public fields. */
typedef struct {
    kva_event *event;
    kva_batch *batch;
    const uint8_t *payload, *end;
    uint32_t seen; /* one bit a field */
    int has_extra_keys;
    uint64_t extra_keys;
} reading;

/* All readers below return NULL for what is left to Python. */

static const uint8_t *read_ascii(const uint8_t *at, const uint8_t *end, kva_text *out)
{
    if (at < end && *at == KVA_MP_NIL)
        return at + 1;
    at = kva_mp_read_str(at, end, out);
    uint8_t bits = 0;
    for (size_t i = 0; at && i < out->length; i++)
        bits |= out->data[i];
    return bits < 0x80 ? at : NULL;
}

static const uint8_t *read_int_or_nil(const uint8_t *at, const uint8_t *end)
{
    kva_mp_int ignored;
    return at < end && *at == KVA_MP_NIL ? at + 1 : kva_mp_read_int(at, end, &ignored);
}

static const uint8_t *read_nil(const uint8_t *at, const uint8_t *end)
{
    return at < end && *at == KVA_MP_NIL ? at + 1 : NULL;
}

static const uint8_t *read_hash(const uint8_t *at, const uint8_t *end, kva_handle *out)
{
    kva_mp_int number;
    const uint8_t *after = kva_mp_read_int(at, end, &number);
    if (after) {
        out->kind = KVA_HANDLE_INT;
        out->number = number.number;
        return after;
    }
    after = kva_mp_read_bin(at, end, &out->bytes);
    if (!after || out->bytes.length == 0 || out->bytes.length > KVA_MAX_HANDLE_BYTES)
        return NULL;
    out->kind = KVA_HANDLE_BYTES;
    return after;
}

static const uint8_t *read_hashes(reading *r, const uint8_t *at)
{
    uint64_t count;
    at = kva_mp_read_array(at, r->end, &count);
    if (!at || count > KVA_MAX_HASHES)
        return NULL;
    r->event->hashes_at = (size_t)(at - r->payload);
    r->event->hash_count = (size_t)count;
    for (uint64_t i = 0; i < count; i++) {
        kva_handle hash;
        at = read_hash(at, r->end, &hash);
        if (!at || (i > 0 && hash.kind != r->event->hashes_kind))
            return NULL;
        r->event->hashes_kind = hash.kind;
    }
    return at;
}

static const uint8_t *read_tokens(reading *r, const uint8_t *at)
{
    uint64_t count;
    at = kva_mp_read_array(at, r->end, &count);
    if (!at || count > KVA_MAX_TOKENS)
        return NULL;
    r->event->tokens_at = (size_t)(at - r->payload);
    r->event->token_count = (size_t)count;
    if (count >= KVA_MP_RUN_MIN) {
        const kva_mp_runs *runs = &r->batch->runs;
        uint32_t run = r->batch->run;
        while (run < runs->count && runs->run[run].first < r->event->tokens_at)
            run++;
        r->batch->run = run;
        if (run < runs->count && runs->run[run].first == r->event->tokens_at) {
            if (runs->run[run].half)
                r->event->half = (kva_ids_half){r->payload + runs->run[run].half, runs->run[run].before_half};
            return r->payload + runs->run[run].end;
        }
    }
    return kva_ids_skip(&at, r->end, count, &r->event->half) == count ? at : NULL;
}

/* Keys that set no block apart from another of the same tokens: nil, or nil for each block. */
static const uint8_t *read_extra_keys(reading *r, const uint8_t *at)
{
    if (at < r->end && *at == KVA_MP_NIL)
        return at + 1;
    r->has_extra_keys = 1;
    at = kva_mp_read_array(at, r->end, &r->extra_keys);
    for (uint64_t i = 0; at && i < r->extra_keys; i++)
        at = read_nil(at, r->end);
    return at;
}

static const uint8_t *read_field(reading *r, field which, const uint8_t *at)
{
    kva_event *event = r->event;
    kva_text ignored = {NULL, 0};
    if (r->seen & 1u << which) /* a field said twice */
        return NULL;
    r->seen |= 1u << which;
    switch (which) {
    case HASHES: return read_hashes(r, at);
    case PARENT: return at < r->end && *at == KVA_MP_NIL ? at + 1 : read_hash(at, r->end, &event->parent);
    case TOKENS: return read_tokens(r, at);
    case BLOCK_SIZE: return kva_mp_read_count(at, r->end, &event->block_size);
    case LORA_ID: return read_int_or_nil(at, r->end);
    case MEDIUM: return read_ascii(at, r->end, &event->medium);
    case LORA_NAME:
    case CACHE_SALT: return read_nil(at, r->end);
    case EXTRA_KEYS: return read_extra_keys(r, at);
    case GROUP: return kva_mp_read_optional_count(at, r->end, &event->has_group, &event->group);
    case SPEC_KIND: return read_ascii(at, r->end, &event->spec_kind);
    case WINDOW: return kva_mp_read_optional_count(at, r->end, &event->has_window, &event->window);
    case LOCALITY:
    case OWNERSHIP:
    case SESSION_ID: return read_ascii(at, r->end, &ignored);
    }
    return NULL;
}

static inline uint64_t load8(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* memcmp for names of a few bytes, without the call. */
static inline int same_bytes(const uint8_t *a, const uint8_t *b, size_t length)
{
    if (length < 8) {
        for (size_t i = 0; i < length; i++)
            if (a[i] != b[i])
                return 0;
        return 1;
    }
    uint64_t differ = load8(a + length - 8) ^ load8(b + length - 8);
    for (size_t i = 0; i + 8 < length; i += 8)
        differ |= load8(a + i) ^ load8(b + i);
    return differ == 0;
}

static inline int text_is(kva_text text, const char *name, size_t length)
{
    return text.length == length && same_bytes(text.data, (const uint8_t *)name, length);
}

static const event_schema *schema_of(kva_text kind)
{
    if (text_is(kind, "BlockStored", 11))
        return &stored_schema;
    return text_is(kind, "BlockRemoved", 12) ? &removed_schema : NULL;
}

/* Read a key. *index: the field expected; becomes the field it names, or the schema's count. */
static inline const uint8_t *read_key(const reading *r, const event_schema *schema, const uint8_t *at, size_t *index)
{
    /* Engines keep to one order. To compare with what is expected, instead of reading how long the key is, lets the
       processor go on before it has the answer. */
    const named_field *expected = schema->fields + *index;
    if ((size_t)(r->end - at) > expected->length && *at == (0xa0 | expected->length) &&
        same_bytes(at + 1, (const uint8_t *)expected->name, expected->length))
        return at + 1 + expected->length;
    kva_text key;
    at = kva_mp_read_str(at, r->end, &key);
    if (!at || text_is(key, "type", 4)) /* a second type */
        return NULL;
    for (*index = 0; *index < schema->count; ++*index)
        if (text_is(key, schema->fields[*index].name, schema->fields[*index].length))
            break;
    return at;
}

static const uint8_t *read_map(reading *r, const event_schema *schema, const uint8_t *at, uint64_t pairs)
{
    size_t index = 0;
    for (; at && pairs > 0; pairs--) {
        at = read_key(r, schema, at, &index);
        if (!at)
            return NULL;
        if (index < schema->count)
            at = read_field(r, schema->fields[index++].field, at);
        else
            at = kva_mp_skip(at, r->end, 1, KVA_MP_DEPTH_LIMIT, NULL);
        if (index == schema->count)
            index = 0;
    }
    return at;
}

static const uint8_t *read_array(reading *r, const event_schema *schema, const uint8_t *at, uint64_t values)
{
    for (size_t i = 0; at && values > 0; i++, values--) {
        if (i == schema->count)
            return kva_mp_skip(at, r->end, values, KVA_MP_DEPTH_LIMIT, NULL);
        at = read_field(r, schema->fields[i].field, at);
    }
    return at;
}

static const uint8_t *read_event(reading *r, const uint8_t *at)
{
    uint64_t count;
    kva_text text;
    const uint8_t *inside = kva_mp_read_map(at, r->end, &count);
    int is_map = inside != NULL;
    if (is_map) {
        /* A map that does not begin with its type is left to Python. */
        at = count == 0 ? NULL : kva_mp_read_str(inside, r->end, &text);
        if (!at || !text_is(text, "type", 4))
            return NULL;
    } else {
        at = kva_mp_read_array(at, r->end, &count);
        if (!at || count == 0)
            return NULL;
    }
    at = kva_mp_read_str(at, r->end, &text);
    const event_schema *schema = at ? schema_of(text) : NULL;
    if (!schema)
        return NULL;
    at = is_map ? read_map(r, schema, at, count - 1) : read_array(r, schema, at, count - 1);
    if (!at || (r->seen & schema->required) != schema->required)
        return NULL;
    if (r->has_extra_keys && r->extra_keys != r->event->hash_count)
        return NULL;
    r->event->kind = schema->kind;
    return at;
}

const uint8_t *kva_read_event(kva_batch *batch, kva_event *event, const uint8_t *at)
{
    reading r = {.event = event, .batch = batch, .payload = batch->payload, .end = batch->payload + batch->length};
    return read_event(&r, at);
}

/* These read what `kva_batch_next` has checked, so that the longest there can be is as good an end as any. */

const uint8_t *kva_read_handle(const uint8_t *at, kva_handle *out)
{
    *out = (kva_handle){KVA_HANDLE_NONE, 0, {NULL, 0}};
    return read_hash(at, at + 5 + KVA_MAX_HANDLE_BYTES, out);
}

void kva_read_numbers(const uint8_t *at, size_t count, uint64_t *numbers)
{
    for (size_t i = 0; i < count; i++) {
        kva_mp_int number = {0, 0};
        at = kva_mp_read_int(at, at + 9, &number);
        numbers[i] = number.number;
    }
}
