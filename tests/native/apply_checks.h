/* Checks of batches applied from their bytes, for the kernels' driver. */
#ifndef APPLY_CHECKS_H
#define APPLY_CHECKS_H

#include "apply.h"
#include "batch_checks.h"
#include "index_model.h"

enum { APPLY_SIZE = 16, APPLY_MOST = 12 };

/* What one check works on: an index with one worker that was taught what it sends. */
typedef struct {
    model base; /* for what holds whatever happens */
    kva_column *column;
    kva_applier applier;
    maker m;
} apply_check;

static inline void learn_usual(kva_column *column)
{
    kva_unlearn(column);
    kva_learn(column, "GPU", 3, 0, 0, NULL, 0, 0, 0, APPLY_SIZE, 0);
    kva_learn(column, "CPU_PINNED", 10, 0, 0, NULL, 0, 0, 0, APPLY_SIZE, 1);
}

static inline void apply_begin(apply_check *check, uint64_t seed, index_expectation expect)
{
    model_begin(&check->base, seed, expect);
    memset(&check->applier, 0, sizeof check->applier);
    check->m.state = seed;
    check->column = kva_index_add_worker(check->base.index, 7, 1);
    learn_usual(check->column);
}

static inline void apply_end(apply_check *check)
{
    check_structure(&check->base);
    kva_index_drop_worker(check->base.index, check->column);
    for (uint32_t plane = 0; plane < check->base.planes; plane++)
        check->base.expect(check->base.index->planes[plane]->count == 0, "no block stays when its worker goes");
    check->base.expect(check->base.index->sets.live == 0, "no set stays either");
    kva_index_free(check->base.index);
    kva_applier_free(&check->applier);
}

/* Apply to the end. Returns the events handed back; `woken` counts blocks that were waited for. */
static inline size_t apply_all(apply_check *check, kva_batch *batch, size_t *woken)
{
    size_t handed_back = 0;
    for (;;) {
        kva_applied outcome = kva_apply(check->base.index, check->column, batch, &check->applier);
        if (outcome == KVA_ALL_APPLIED)
            return handed_back;
        if (outcome == KVA_SOMEBODY_WOKE) {
            for (size_t i = 0; i < check->applier.woken_count; i++) {
                uint64_t key = 0;
                const kva_woken *one = &check->applier.woken[i];
                check->base.expect(!kva_column_key(check->column, one->handle, &key) || key == one->key, "keys agree");
            }
            *woken += check->applier.woken_count;
            continue;
        }
        check->base.expect(outcome == KVA_NEEDS_HELP, "there is memory");
        check->base.expect(check->applier.event.end <= batch->length, "an event handed back lies in its batch");
        handed_back++;
    }
}

/* Any batch that engines send, and damaged ones: nothing is read or written outside, and the books stay in order. */
static inline void check_apply_any(apply_check *check)
{
    static made_event made[16];
    maker *m = &check->m;
    for (size_t round = 0; round < 400; round++) {
        size_t count = 1 + (size_t)make_random(m, 16), woken = 0;
        make_batch(m, made, count);
        size_t flips = make_random(m, 3) ? 0 : 1 + (size_t)make_random(m, 3);
        for (size_t i = 0; i < flips; i++)
            m->bytes[make_random(m, m->length)] ^= (uint8_t)(1u << make_random(m, 8));
        uint8_t *payload = exact_copy(m->bytes, m->length);
        kva_batch batch;
        if (kva_batch_open(&batch, payload, m->length, 100, 32)) {
            size_t events = batch.event_count, handed_back = apply_all(check, &batch, &woken);
            check->base.expect(handed_back <= events && batch.index == events, "all events are gone through");
        } else
            check->base.expect(flips > 0, "a whole batch opens");
        free(payload);
        if (round % 50 == 0)
            check_structure(&check->base);
    }
}

static inline void put_head_of_event(maker *m, const char *kind, size_t fields)
{
    put(m, 0x80 | fields);
    put_text(m, "type");
    put_text(m, kind);
    put_text(m, "block_hashes");
}

static inline void put_number(maker *m, uint64_t number)
{
    put_head(m, 0xcf, 8, number);
}

/* A store of blocks `first`.. of a chain whose hashes are `handles` and whose ids are `tokens`. */
static inline void put_chain(maker *m, const uint64_t *handles, const uint64_t *tokens, size_t first, size_t count)
{
    put_head_of_event(m, "BlockStored", 6);
    put_array(m, count);
    for (size_t i = 0; i < count; i++)
        put_number(m, handles[first + i]);
    put_text(m, "parent_block_hash");
    if (first)
        put_number(m, handles[first - 1]);
    else
        put(m, 0xc0);
    put_text(m, "token_ids");
    put_array(m, count * APPLY_SIZE);
    for (size_t i = 0; i < count * APPLY_SIZE; i++)
        put_uint(m, tokens[first * APPLY_SIZE + i]);
    put_text(m, "block_size");
    put_uint(m, APPLY_SIZE);
    put_text(m, "medium");
    put_text(m, "GPU");
}

static inline uint32_t found_blocks(apply_check *check, const uint64_t *tokens, size_t blocks)
{
    static kva_hit hits[KVA_MAX_WORKERS];
    static const uint64_t asked = UINT64_MAX;
    kva_tokens ids = {tokens, blocks * APPLY_SIZE, KVA_U64};
    kva_walk walk;
    kva_walk_begin(&walk, check->base.index, 0, &asked, 1, 0, hits);
    check->base.expect(kva_walk_tokens(&walk, &ids, APPLY_SIZE, 7, blocks) == KVA_OK, "ids are walked along");
    kva_walk_end(&walk);
    return walk.hit_count ? hits[0].blocks : 0;
}

/* One chain in two events and a removal in the middle, of one batch or with the second half first. */
static inline void check_apply_chain(apply_check *check, int reversed)
{
    maker *m = &check->m;
    uint64_t handles[APPLY_MOST], tokens[APPLY_MOST * APPLY_SIZE];
    size_t blocks = 3 + (size_t)make_random(m, APPLY_MOST - 3), cut = 1 + (size_t)make_random(m, blocks - 1);
    size_t hole = (size_t)make_random(m, blocks), woken = 0;
    for (size_t i = 0; i < blocks; i++)
        handles[i] = make_random(m, UINT64_C(1) << 40) << 20 | i;
    for (size_t i = 0; i < blocks * APPLY_SIZE; i++)
        tokens[i] = make_random(m, 70000);
    m->length = 0;
    put(m, 0x92);
    put(m, 1);
    put_array(m, 3);
    put_chain(m, handles, tokens, reversed ? cut : 0, reversed ? blocks - cut : cut);
    put_chain(m, handles, tokens, reversed ? 0 : cut, reversed ? cut : blocks - cut);
    put_head_of_event(m, "BlockRemoved", 3);
    put_array(m, 1);
    put_number(m, handles[hole]);
    put_text(m, "medium");
    put_text(m, "GPU");
    uint8_t *payload = exact_copy(m->bytes, m->length);
    kva_batch batch;
    check->base.expect(kva_batch_open(&batch, payload, m->length, 3, 5), "the batch opens");
    if (reversed)
        check->base.expect(kva_column_wait(check->column, handles[cut - 1]), "somebody waits");
    size_t handed_back = apply_all(check, &batch, &woken);
    check->base.expect(handed_back == (size_t)reversed, "a store of unknown parent is handed back, no other event");
    check->base.expect(woken == (size_t)reversed, "who waits is woken");
    size_t expected = reversed && cut < hole ? cut : hole;
    check->base.expect(found_blocks(check, tokens, blocks) == expected, "the chain is found up to its hole");
    free(payload);
}

static inline void check_profiles(apply_check *check)
{
    char text[KVA_MAX_NAME + 1];
    memset(text, 'x', sizeof text);
    kva_column *column = check->column;
    kva_unlearn(column);
    check->base.expect(!kva_learn(column, text, KVA_MAX_NAME + 1, 0, 0, NULL, 0, 0, 0, 1, 0), "too long a medium");
    check->base.expect(!kva_learn(column, NULL, 0, 0, 0, text, KVA_MAX_NAME + 1, 0, 0, 1, 0), "too long a kind");
    for (uint32_t i = 0; i < KVA_MAX_PROFILES; i++)
        check->base.expect(kva_learn(column, text, KVA_MAX_NAME, 1, i, text, 0, 1, i, 1, 0), "a profile");
    check->base.expect(!kva_learn(column, NULL, 0, 0, 0, NULL, 0, 0, 0, 1, 0), "one profile too many");
    learn_usual(column);
}

static inline void check_apply(index_expectation expect)
{
    static apply_check check;
    apply_begin(&check, 21, expect);
    check_apply_any(&check);
    check_profiles(&check);
    for (size_t round = 0; round < 300; round++)
        check_apply_chain(&check, round % 3 == 0);
    apply_end(&check);
}

#endif
