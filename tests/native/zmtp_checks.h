/* Checks of the ZMTP scanner for the kernels' driver and the fuzz run: what was written is what is told, at each place
   where the bytes may end; nothing is read outside. */
#ifndef ZMTP_CHECKS_H
#define ZMTP_CHECKS_H

#include "batch_checks.h"
#include "bytes.h"
#include "zmtp.h"

enum { MADE_ROOM = 200, MADE_MOST_BYTES = 5000 };

/* What the scanner is to tell at the end of a frame. */
typedef struct {
    size_t frame_start, head, frame_end;
    kva_zmtp_kind kind; /* KVA_ZMTP_WANTS_MORE: nothing, the message goes on */
    uint64_t number;
} made_frame;

typedef struct {
    made_frame frames[MADE_ROOM];
    size_t count;
} made_stream;

static inline made_frame *put_zmtp_frame(maker *m, made_stream *made, unsigned flags, size_t size, uint64_t first)
{
    made_frame *frame = &made->frames[made->count++];
    int is_long = size > 255 || make_random(m, 4) == 0;
    frame->frame_start = m->length;
    put_head(m, flags | (is_long ? 2 : 0), is_long ? 8 : 1, size);
    frame->head = m->length - frame->frame_start;
    for (size_t i = 0; i < size; i++)
        put(m, i < 8 ? first >> (56 - 8 * i) : i);
    frame->frame_end = m->length;
    frame->kind = KVA_ZMTP_WANTS_MORE;
    return frame;
}

static inline size_t make_size(maker *m)
{
    static const size_t sizes[] = {0, 1, 7, 8, 8, 8, 9, 20, 255, 256, 300};
    return sizes[make_random(m, sizeof sizes / sizeof *sizes)];
}

/* A message of one to five frames, with a command between them now and then. */
static inline void make_zmtp_message(maker *m, made_stream *made)
{
    size_t size = 0, before;
    uint64_t number = 0, first;
    for (size_t left = 1 + (size_t)make_random(m, 5); left > 0; left--) {
        if (make_random(m, 5) == 0)
            put_zmtp_frame(m, made, 4, make_size(m), 0)->kind = KVA_ZMTP_COMMAND;
        before = size;
        size = make_size(m);
        first = make_random(m, 3) ? make_random(m, 5) : UINT64_MAX - make_random(m, 2);
        made_frame *frame = put_zmtp_frame(m, made, left > 1, size, first);
        if (left == 1)
            frame->kind = before == 8 ? KVA_ZMTP_BATCH : KVA_ZMTP_NO_BATCH;
        frame->number = number;
        number = first;
    }
}

static inline void make_zmtp_stream(maker *m, made_stream *made, size_t messages)
{
    m->length = made->count = 0;
    for (; messages > 0; messages--)
        make_zmtp_message(m, made);
}

/* Reads the made bytes up to `length`, from frame `from` on, and goes on with `zmtp`. Returns the first frame that is
   not whole. */
static inline size_t check_zmtp_part(kva_zmtp *zmtp, const maker *m, const made_stream *made, size_t from,
                                     size_t length, expectation expect)
{
    size_t start = from < made->count ? made->frames[from].frame_start : m->length, at = 0, next = from;
    uint8_t *bytes = exact_copy(m->bytes + start, length - start);
    for (; next < made->count && made->frames[next].frame_end <= length; next++) {
        const made_frame *frame = &made->frames[next];
        if (frame->kind == KVA_ZMTP_WANTS_MORE)
            continue;
        kva_zmtp_kind kind = kva_zmtp_next(zmtp, bytes, length - start, MADE_MOST_BYTES, &at);
        expect(kind == frame->kind, "what was sent is told");
        expect(at == frame->frame_end - start, "the frame is done with");
        expect(zmtp->data == bytes + (frame->frame_start + frame->head - start), "its data are where they lie");
        expect(zmtp->length == frame->frame_end - frame->frame_start - frame->head, "and as many as they are");
        expect(kind != KVA_ZMTP_BATCH || zmtp->number == frame->number, "a batch has its number");
    }
    expect(kva_zmtp_next(zmtp, bytes, length - start, MADE_MOST_BYTES, &at) == KVA_ZMTP_WANTS_MORE, "no more is whole");
    size_t left = length - start - at, whole = 2;
    if (next < made->count) {
        expect(start + at == made->frames[next].frame_start, "what is whole is done with");
        whole = made->frames[next].frame_end - made->frames[next].frame_start;
        expect(left < made->frames[next].head || zmtp->length == whole, "what the next frame takes is known by its head");
    }
    expect(zmtp->length > left && zmtp->length <= whole, "no more is wanted than the next frame takes");
    free(bytes);
    return next;
}

static inline void check_broken_frame(const uint8_t *head, size_t length, size_t most_bytes, expectation expect)
{
    for (size_t lead = 0; lead < 2; lead++) {
        uint8_t bytes[2 + 9] = {0, 0}; /* an empty message before it */
        memcpy(bytes + 2 * lead, head, length);
        uint8_t *copy = exact_copy(bytes, 2 * lead + length);
        kva_zmtp zmtp = {.state = KVA_ZMTP_BETWEEN};
        size_t at = 0;
        expect(!lead || kva_zmtp_next(&zmtp, copy, 2 + length, most_bytes, &at) == KVA_ZMTP_NO_BATCH, "before it");
        for (int times = 0; times < 2; times++)
            expect(kva_zmtp_next(&zmtp, copy, 2 * lead + length, most_bytes, &at) == KVA_ZMTP_BROKEN, "it is broken");
        expect(at == 2 * lead, "a broken frame is not passed");
        free(copy);
    }
}

static inline void check_broken_frames(expectation expect)
{
    for (unsigned flags = 0; flags < 256; flags++) {
        uint8_t head = (uint8_t)flags;
        if (flags > 7 || flags == 5 || flags == 7)
            check_broken_frame(&head, 1, SIZE_MAX, expect);
    }
    static const uint64_t sizes[] = {101, UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX - 8, UINT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t head[9] = {2};
        kva_store64be(head + 1, sizes[i]);
        check_broken_frame(head, 9, 100, expect);
        if (sizes[i] > SIZE_MAX / 2)
            check_broken_frame(head, 9, SIZE_MAX, expect);
    }
    check_broken_frame((const uint8_t[]){0, 101}, 2, 100, expect);
}

static inline void check_zmtp(expectation expect)
{
    static maker m = {.state = 7};
    static made_stream made;
    for (size_t round = 0; round < 100; round++) {
        make_zmtp_stream(&m, &made, 1 + (size_t)make_random(&m, 12));
        for (size_t length = 0; length <= m.length; length += round < 20 ? 1 : 1 + (size_t)make_random(&m, 400)) {
            kva_zmtp zmtp = {.state = KVA_ZMTP_BETWEEN};
            size_t next = check_zmtp_part(&zmtp, &m, &made, 0, length, expect);
            next = check_zmtp_part(&zmtp, &m, &made, next, m.length, expect); /* it goes on where it ended */
            expect(next == made.count, "all is told in two parts");
        }
    }
    check_broken_frames(expect);
}

#endif
