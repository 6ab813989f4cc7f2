/* Checks of the batch scanner for the kernels' driver: what was written is what is read, nothing is read outside. */
#ifndef BATCH_CHECKS_H
#define BATCH_CHECKS_H

#include "batch.h"
#include "batch_maker.h"
#include "id_runs.h"

typedef void (*expectation)(int holds, const char *what);

/* A copy that ends where the bytes end. */
static inline uint8_t *exact_copy(const uint8_t *bytes, size_t length)
{
    uint8_t *copy = malloc(length ? length : 1);
    if (!copy)
        abort();
    memcpy(copy, bytes, length);
    return copy;
}

static inline void check_made_batch(maker *m, made_event *made, size_t count, expectation expect)
{
    kva_batch batch;
    kva_event event;
    uint64_t words[MAKER_TOKENS];
    uint8_t *payload = exact_copy(m->bytes, m->length);
    expect(kva_batch_open(&batch, payload, m->length, count, 5), "a batch as engines send it opens");
    expect(batch.event_count == count, "events are counted");
    for (size_t i = 0; i < count; i++) {
        expect(kva_batch_next(&batch, &event), "there is a next event");
        expect(event.kind == (made[i].stored ? KVA_EVENT_STORED : KVA_EVENT_REMOVED), "the kind is known");
        expect(event.hash_count == made[i].hash_count, "hashes are counted");
        expect(event.block_size == made[i].block_size, "the block size is read");
        expect(event.token_count == made[i].token_count, "tokens are counted");
        kva_batch_tokens(&batch, &event, words);
        expect(memcmp(words, made[i].tokens, event.token_count * sizeof *words) == 0, "tokens are read");
        memset(words, 0, sizeof words);
        kva_read_tokens(payload + event.tokens_at, event.token_count, words);
        expect(memcmp(words, made[i].tokens, event.token_count * sizeof *words) == 0, "tokens are read without an end");
        const uint8_t *at = payload + event.hashes_at;
        kva_handle hash;
        for (size_t h = 0; h < event.hash_count; h++)
            at = kva_read_handle(at, &hash);
        expect(event.hash_count == 0 || hash.kind == event.hashes_kind, "hashes are of one kind");
    }
    expect(!kva_batch_next(&batch, &event), "there is an end");
    expect(!kva_batch_open(&batch, payload, m->length, count - 1, 5), "too many events are refused");
    expect(!kva_batch_open(&batch, payload, m->length, count, 3), "too deep a batch is refused");
    free(payload);
}

static inline void check_cut_batch(const maker *m, expectation expect)
{
    kva_batch batch;
    for (size_t length = 0; length < m->length; length++) {
        uint8_t *payload = exact_copy(m->bytes, length);
        expect(!kva_batch_open(&batch, payload, length, SIZE_MAX, 64), "a batch that ends early is refused");
        free(payload);
    }
}

/* Both ways over one run, cut at each place. */
static inline void check_run(maker *m, expectation expect)
{
    uint64_t tokens[MAKER_TOKENS], words[MAKER_TOKENS], others[MAKER_TOKENS];
    size_t count = 1 + (size_t)make_random(m, 130);
    m->length = 0;
    put_tokens(m, tokens, count);
    size_t head = m->bytes[0] == 0xdc ? 3 : 1;
    for (size_t length = 0; length <= m->length - head; length++) {
        uint8_t *run = exact_copy(m->bytes + head, length);
        const uint8_t *one = run, *other = run;
        kva_ids_half half;
        uint64_t ids = kva_ids_skip(&one, run + length, count, &half);
        expect(ids == kva_ids_skip_portable(&other, run + length, count) && one == other, "both skip alike");
        kva_ids_read(run, run + length, (size_t)ids, half, words);
        kva_ids_read_portable(run, (size_t)ids, others);
        expect(memcmp(words, tokens, (size_t)ids * sizeof *words) == 0, "ids are read");
        expect(memcmp(others, tokens, (size_t)ids * sizeof *words) == 0, "ids are read without shuffles");
        free(run);
    }
}

static inline void check_batches(expectation expect)
{
    static maker m = {.state = 1};
    static made_event made[16];
    for (size_t round = 0; round < 300; round++) {
        size_t count = 1 + (size_t)make_random(&m, 16);
        make_batch(&m, made, count);
        check_made_batch(&m, made, count, expect);
        if (round < 10)
            check_cut_batch(&m, expect);
        check_run(&m, expect);
    }
}

#endif
