#include "batch.h"

#include "event_fields.h"

#include <math.h>
#include <string.h>

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

/* The event at `at`, whose fields are all 0 so far. */
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

/* Seconds as float64, or an integer. */
static const uint8_t *read_ts(const uint8_t *at, const uint8_t *end, double *ts)
{
    kva_mp_int number;
    if (end - at < 9 || *at != 0xcb) {
        at = kva_mp_read_int(at, end, &number);
        if (at)
            *ts = number.negative ? (double)(int64_t)number.number : (double)number.number;
        return at;
    }
    uint64_t bits = kva_mp_load(at + 1, 8);
    memcpy(ts, &bits, sizeof bits);
    return isfinite(*ts) ? at + 9 : NULL;
}

int kva_batch_open(kva_batch *batch, const uint8_t *payload, size_t length, size_t max_events, unsigned max_depth)
{
    const uint8_t *at = payload, *end = payload + length;
    uint64_t elements, events, rank = 0;
    memset(batch, 0, offsetof(kva_batch, runs));
    batch->payload = payload;
    batch->length = length;
    batch->runs.base = payload;
    batch->runs.count = 0;
    if (max_depth < 2)
        return 0;
    at = kva_mp_read_array(at, end, &elements);
    if (!at || elements < 2 || !(at = read_ts(at, end, &batch->ts)))
        return 0;
    at = kva_mp_read_array(at, end, &events);
    if (!at || events > max_events)
        return 0;
    batch->event_count = (size_t)events;
    batch->at = (size_t)(at - payload);
    at = kva_mp_skip(at, end, events, max_depth - 2, &batch->runs);
    if (at && elements > 2)
        at = kva_mp_read_optional_count(at, end, &batch->has_rank, &rank);
    if (at && elements > 3)
        at = kva_mp_skip(at, end, elements - 3, max_depth - 1, NULL);
    batch->rank = (int64_t)rank;
    return at == end;
}

int kva_batch_next(kva_batch *batch, kva_event *event)
{
    if (batch->index == batch->event_count)
        return 0;
    memset(event, 0, sizeof *event);
    const uint8_t *start = batch->payload + batch->at;
    reading r = {.event = event, .batch = batch, .payload = batch->payload, .end = batch->payload + batch->length};
    const uint8_t *end = read_event(&r, start);
    if (!end) {
        memset(event, 0, sizeof *event);
        end = kva_mp_skip(start, r.end, 1, KVA_MP_DEPTH_LIMIT, NULL);
    }
    event->start = batch->at;
    event->end = (size_t)(end - batch->payload);
    batch->at = event->end;
    batch->index++;
    return 1;
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

size_t kva_read_tokens(const uint8_t *at, size_t count, uint64_t *words)
{
    kva_ids_read(at, at + count, count, (kva_ids_half){NULL, 0}, words); /* an id is a byte at least */
    return count;
}

void kva_batch_tokens(const kva_batch *batch, const kva_event *event, uint64_t *words)
{
    const uint8_t *at = batch->payload + event->tokens_at, *end = batch->payload + batch->length;
    kva_ids_read(at, end, event->token_count, event->half, words);
}
