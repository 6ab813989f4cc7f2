#include "batch.h"

#include "event.h"

#include <math.h>
#include <string.h>

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
    const uint8_t *end = kva_read_event(batch, event, start);
    if (!end) {
        memset(event, 0, sizeof *event);
        end = kva_mp_skip(start, batch->payload + batch->length, 1, KVA_MP_DEPTH_LIMIT, NULL);
    }
    event->start = batch->at;
    event->end = (size_t)(end - batch->payload);
    batch->at = event->end;
    batch->index++;
    return 1;
}

int kva_read_tokens(const uint8_t *at, size_t count, uint64_t *words)
{
    kva_ids_read(at, at + count, count, (kva_ids_half){NULL, 0}, words); /* an id is a byte at least */
    return (int)count;
}

void kva_batch_tokens(const kva_batch *batch, const kva_event *event, uint64_t *words)
{
    const uint8_t *at = batch->payload + event->tokens_at, *end = batch->payload + batch->length;
    kva_ids_read(at, end, event->token_count, event->half, words);
}
