/* Readers of single MessagePack items, and a walk over whole values. Nothing is built and nothing is copied.

   Each reader takes the position of an item and the end of the bytes, and returns the position after what it read, or
   NULL when the item is of another type or the bytes end early. No reader looks at or past `end`.

   Source: the MessagePack specification's table of formats. */
#ifndef KVA_MSGPACK_H
#define KVA_MSGPACK_H

#include "bytes.h"
#include "id_runs.h"

#include <stddef.h>
#include <stdint.h>

enum { KVA_MP_NIL = 0xc0, KVA_MP_DEPTH_LIMIT = 64 };

typedef struct {
    uint64_t number; /* two's complement when negative */
    int negative;
} kva_mp_int;

typedef struct {
    const uint8_t *data; /* not null-terminated */
    size_t length;
} kva_text;

/* A big-endian unsigned integer of 1, 2, 4 or 8 bytes. */
static inline uint64_t kva_mp_load(const uint8_t *at, size_t width)
{
    switch (width) {
    case 1: return at[0];
    case 2: return (uint64_t)at[0] << 8 | at[1];
    case 4: return kva_load32be(at);
    default: return kva_load64be(at);
    }
}

/* Any integer, in any of its encodings. */
static inline const uint8_t *kva_mp_read_int(const uint8_t *at, const uint8_t *end, kva_mp_int *out)
{
    if (at == end)
        return NULL;
    uint8_t head = *at;
    if (head < 0x80 || head >= 0xe0) {
        out->negative = head >= 0xe0;
        out->number = (uint64_t)(int8_t)head;
        return at + 1;
    }
    if (head < 0xcc || head > 0xd3)
        return NULL;
    size_t width = (size_t)1 << (head & 3); /* 0xcc..0xcf unsigned, 0xd0..0xd3 signed: 1, 2, 4, 8 bytes */
    if ((size_t)(end - at) <= width)
        return NULL;
    uint64_t number = kva_mp_load(at + 1, width);
    out->negative = head >= 0xd0 && at[1] > 0x7f;
    if (out->negative && width < 8)
        number |= UINT64_MAX << 8 * width;
    out->number = number;
    return at + 1 + width;
}

/* An integer of 0..2^63-1. */
static inline const uint8_t *kva_mp_read_count(const uint8_t *at, const uint8_t *end, uint64_t *out)
{
    kva_mp_int number;
    at = kva_mp_read_int(at, end, &number);
    if (!at || number.number >> 63)
        return NULL;
    *out = number.number;
    return at;
}

/* The same, or nil. */
static inline const uint8_t *kva_mp_read_optional_count(const uint8_t *at, const uint8_t *end, int *has,
                                                        uint64_t *out)
{
    if (at < end && *at == KVA_MP_NIL)
        return at + 1;
    *has = 1;
    return kva_mp_read_count(at, end, out);
}

/* A head with `width` bytes of argument behind it. */
static inline const uint8_t *kva_mp_read_argument(const uint8_t *at, const uint8_t *end, size_t width, uint64_t *out)
{
    if ((size_t)(end - at) <= width)
        return NULL;
    *out = kva_mp_load(at + 1, width);
    return at + 1 + width;
}

/* The head of an array. `out`: how many values follow. */
static inline const uint8_t *kva_mp_read_array(const uint8_t *at, const uint8_t *end, uint64_t *out)
{
    if (at == end)
        return NULL;
    if ((*at & 0xf0) == 0x90) {
        *out = *at & 0x0f;
        return at + 1;
    }
    return *at == 0xdc || *at == 0xdd ? kva_mp_read_argument(at, end, *at == 0xdc ? 2 : 4, out) : NULL;
}

/* The head of a map. `out`: how many pairs of key and value follow. */
static inline const uint8_t *kva_mp_read_map(const uint8_t *at, const uint8_t *end, uint64_t *out)
{
    if (at == end)
        return NULL;
    if ((*at & 0xf0) == 0x80) {
        *out = *at & 0x0f;
        return at + 1;
    }
    return *at == 0xde || *at == 0xdf ? kva_mp_read_argument(at, end, *at == 0xde ? 2 : 4, out) : NULL;
}

static inline const uint8_t *kva_mp_take(const uint8_t *at, const uint8_t *end, uint64_t length, kva_text *out)
{
    if (!at || length > (uint64_t)(end - at))
        return NULL;
    out->data = at;
    out->length = (size_t)length;
    return at + length;
}

/* A str; its bytes are not looked at. */
static inline const uint8_t *kva_mp_read_str(const uint8_t *at, const uint8_t *end, kva_text *out)
{
    if (at == end)
        return NULL;
    if ((*at & 0xe0) == 0xa0)
        return kva_mp_take(at + 1, end, *at & 0x1f, out);
    if (*at < 0xd9 || *at > 0xdb)
        return NULL;
    uint64_t length = 0;
    at = kva_mp_read_argument(at, end, (size_t)1 << (*at - 0xd9), &length);
    return kva_mp_take(at, end, length, out);
}

/* A bin. */
static inline const uint8_t *kva_mp_read_bin(const uint8_t *at, const uint8_t *end, kva_text *out)
{
    if (at == end || *at < 0xc4 || *at > 0xc6)
        return NULL;
    uint64_t length = 0;
    at = kva_mp_read_argument(at, end, (size_t)1 << (*at - 0xc4), &length);
    return kva_mp_take(at, end, length, out);
}

/* Bytes of a whole scalar by its first byte; 0: the byte alone does not say. 0xa0..0xbf are short strings. */
static const uint8_t kva_mp_scalar_bytes[256] = {
#define KVA_ONES 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
    KVA_ONES, KVA_ONES, KVA_ONES, KVA_ONES, KVA_ONES, KVA_ONES, KVA_ONES, KVA_ONES, /* 0x00..0x7f */
    [0xa0] = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
    17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    [0xc0] = 1, 0, 1, 1,
    [0xca] = 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, /* floats, unsigned, signed */
    [0xd4] = 3, 4, 6, 10, 18,              /* extensions of fixed size */
    [0xe0] = KVA_ONES, KVA_ONES,
#undef KVA_ONES
};

/* Where the scalar with a length field at `at` ends: long str, bin, ext. NULL for containers too. */
static inline const uint8_t *kva_mp_skip_long(const uint8_t *at, const uint8_t *end)
{
    uint8_t head = *at;
    uint64_t length = 0;
    kva_text ignored;
    if (head >= 0xd9 && head <= 0xdb)
        return kva_mp_read_str(at, end, &ignored);
    if (head >= 0xc4 && head <= 0xc6)
        return kva_mp_read_bin(at, end, &ignored);
    if (head < 0xc7 || head > 0xc9)
        return NULL;
    at = kva_mp_read_argument(at, end, (size_t)1 << (head - 0xc7), &length);
    return kva_mp_take(at, end, length + 1, &ignored); /* one more for the type */
}

/* Long runs of token ids that a walk went over, the first of them, by their place behind `base`. A second walk over the same
   bytes need not look at them again. */
enum { KVA_MP_RUNS = 64, KVA_MP_RUN_MIN = 32 };

typedef struct {
    const uint8_t *base;
    uint32_t count;
    struct {
        uint32_t first, end, half, before_half; /* half: 0 when not known */
    } run[KVA_MP_RUNS];
} kva_mp_runs;

static inline void kva_mp_note_run(kva_mp_runs *runs, const uint8_t *first, const uint8_t *end,
                                   kva_ids_half half)
{
    if (runs->count == KVA_MP_RUNS || (uint64_t)(end - runs->base) > UINT32_MAX)
        return;
    runs->run[runs->count].first = (uint32_t)(first - runs->base);
    runs->run[runs->count].end = (uint32_t)(end - runs->base);
    runs->run[runs->count].half = half.at ? (uint32_t)(half.at - runs->base) : 0;
    runs->run[runs->count++].before_half = (uint32_t)half.before;
}

/* Where `values` values from `at` on end. NULL when they are malformed, end early, or hold a container more than
   `max_depth` (at most KVA_MP_DEPTH_LIMIT) containers deep. No recursion; reads each byte at most once. Arrays of nothing
   but ids go into `runs`, unless it is NULL. */
static inline const uint8_t *kva_mp_skip(const uint8_t *at, const uint8_t *end, uint64_t values, unsigned max_depth,
                                         kva_mp_runs *runs)
{
    uint64_t left[KVA_MP_DEPTH_LIMIT]; /* values still to come in the containers around this one */
    unsigned depth = 0;
    if (max_depth > KVA_MP_DEPTH_LIMIT)
        max_depth = KVA_MP_DEPTH_LIMIT;
    for (;;) {
        while (values == 0) {
            if (depth == 0)
                return at;
            values = left[--depth];
        }
        values--;
        if (at == end)
            return NULL;
        uint8_t head = *at;
        size_t width = kva_mp_scalar_bytes[head];
        if (width) {
            if ((size_t)(end - at) < width)
                return NULL;
            at += width;
            /* Like follows like: hashes, nils. A guess at the head is sooner there than a look into the table. */
            for (; values > 0 && (size_t)(end - at) >= width && *at == head; values--)
                at += width;
            continue;
        }
        uint64_t inside;
        const uint8_t *first = kva_mp_read_array(at, end, &inside);
        if (first) {
            const uint8_t *behind = first;
            kva_ids_half half;
            uint64_t ids = kva_ids_skip(&behind, end, inside, runs ? &half : NULL);
            if (runs && ids == inside && ids >= KVA_MP_RUN_MIN)
                kva_mp_note_run(runs, first, behind, half);
            inside -= ids;
            first = behind;
        } else if ((first = kva_mp_read_map(at, end, &inside)) != NULL) {
            inside *= 2;
        } else {
            at = kva_mp_skip_long(at, end);
            if (!at)
                return NULL;
            continue;
        }
        if (depth == max_depth)
            return NULL;
        left[depth++] = values;
        values = inside;
        at = first;
    }
}

#endif
