/* Checks of the fleet index for the kernels' driver: random calls against the model, with memory refused at every place. */
#ifndef INDEX_CHECKS_H
#define INDEX_CHECKS_H

#include "index_model.h"

enum { MODEL_RUN = 24 };

/* One run of blocks, some of them next to each other, some twice. */
typedef struct {
    uint32_t blocks[MODEL_RUN];
    uint64_t handles[MODEL_RUN];
    size_t count;
} model_run;

static inline void draw_run(model *m, model_run *run)
{
    uint32_t block = (uint32_t)model_random(m, MODEL_BLOCKS);
    run->count = 1 + (size_t)model_random(m, MODEL_RUN);
    for (size_t i = 0; i < run->count; i++) {
        run->blocks[i] = block;
        run->handles[i] = m->handles[block];
        block = model_random(m, 10) ? (block + 1) % MODEL_BLOCKS : (uint32_t)model_random(m, MODEL_BLOCKS);
    }
}

static inline void model_leave(model_worker *worker, uint32_t block)
{
    if (!model_is_resident(worker, block))
        worker->keyed[block] = 0;
}

static inline void do_add_worker(model *m)
{
    uint32_t lowest = 0;
    while (lowest < MODEL_WORKERS && m->workers[lowest].column)
        lowest++;
    if (lowest == MODEL_WORKERS)
        return;
    int counting = model_random(m, 4) != 0;
    kva_column *column = kva_index_add_worker(m->index, model_word(m), counting);
    if (!column) {
        m->expect(m->index->budget.cap != 0, "a worker is refused under a cap only");
        return;
    }
    m->expect(column->worker == lowest, "the lowest free number is given");
    model_worker *worker = &m->workers[lowest];
    memset(worker, 0, sizeof *worker);
    worker->column = column;
    worker->counting = counting;
    worker->shift = (uint32_t)model_random(m, 3);
}

static inline void do_drop_worker(model *m, model_worker *worker)
{
    kva_index_drop_worker(m->index, worker->column);
    worker->column = NULL;
}

static inline void do_add_copies(model *m, model_worker *worker, const model_run *run)
{
    uint32_t plane = (uint32_t)model_random(m, m->planes);
    kva_column_add_copies(m->index, worker->column, plane, run->handles, run->count);
    worker->stored += run->count;
    for (size_t i = 0; i < run->count; i++) {
        uint32_t *copies = &worker->copies[plane][run->blocks[i]];
        *copies += worker->counting || !*copies;
    }
}

static inline void do_join(model *m, model_worker *worker, const model_run *run)
{
    uint64_t keys[MODEL_RUN];
    uint32_t woken[MODEL_RUN], expected = 0;
    for (size_t i = 0; i < run->count; i++)
        keys[i] = model_key(m, worker, run->blocks[i]);
    size_t count = kva_column_join(m->index, worker->column, run->handles, keys, run->count, woken);
    for (uint32_t i = 0; i < run->count; i++) {
        uint32_t block = run->blocks[i];
        if (worker->waited[block]) {
            m->expect(expected < count && woken[expected] == i, "who waits is woken");
            expected++;
        }
        worker->waited[block] = 0;
        worker->keyed[block] |= (uint8_t)model_is_resident(worker, block);
    }
    m->expect(count == expected, "nobody else is woken");
}

static inline void do_remove(model *m, model_worker *worker, const model_run *run)
{
    uint32_t plane = (uint32_t)model_random(m, m->planes);
    kva_column_remove(m->index, worker->column, plane, run->handles, run->count);
    worker->touched += run->count;
    for (size_t i = 0; i < run->count; i++) {
        uint32_t block = run->blocks[i];
        if (worker->copies[plane][block]) {
            worker->copies[plane][block]--;
            model_leave(worker, block);
        }
    }
}

static inline void do_wait(model *m, model_worker *worker, const model_run *run)
{
    for (size_t i = 0; i < run->count; i++) {
        int waits = model_random(m, 3) != 0;
        if (!waits)
            kva_column_stop_waiting(worker->column, run->handles[i]);
        else if (!kva_column_wait(worker->column, run->handles[i]))
            continue;
        worker->waited[run->blocks[i]] = (uint8_t)waits;
    }
}

static inline void do_forget(model *m, model_worker *worker)
{
    uint8_t planes[KVA_MAX_PLANES] = {0};
    int everything = 1;
    for (uint32_t plane = 0; plane < m->planes; plane++) {
        planes[plane] = (uint8_t)model_random(m, 2);
        everything &= planes[plane];
    }
    kva_column_forget(m->index, worker->column, planes);
    memset(worker->waited, 0, sizeof worker->waited);
    for (uint32_t plane = 0; plane < m->planes; plane++)
        if (planes[plane])
            memset(worker->copies[plane], 0, sizeof worker->copies[plane]);
    for (uint32_t block = 0; block < MODEL_BLOCKS; block++)
        model_leave(worker, block);
    if (everything)
        worker->lost = model_lost(worker);
}

static inline void do_forget_all(model *m, model_worker *worker)
{
    kva_column_forget_all(m->index, worker->column);
    memset(worker->waited, 0, sizeof worker->waited);
    memset(worker->keyed, 0, sizeof worker->keyed);
    memset(worker->copies, 0, sizeof worker->copies);
    worker->lost = model_lost(worker);
}

static inline size_t capacity_of(const kva_column *column)
{
    size_t capacity = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        capacity += column->tables[i].capacity;
    return capacity;
}

static inline void do_forget_oldest(model *m, model_worker *worker)
{
    size_t resident = 0, entries = 0, count = model_random(m, 10) ? (size_t)model_random(m, 40) : SIZE_MAX - (size_t)model_random(m, 9);
    for (uint32_t block = 0; block < MODEL_BLOCKS; block++) {
        resident += (size_t)model_is_resident(worker, block);
        entries += model_is_resident(worker, block) || worker->waited[block];
    }
    int was_whole = model_is_whole(worker);
    size_t before = capacity_of(worker->column);
    size_t gone = kva_column_forget_oldest(m->index, worker->column, count);
    m->expect(capacity_of(worker->column) <= before, "giving up takes no room");
    m->expect(gone <= count && gone <= resident, "no more is given up than asked for");
    m->expect(!was_whole || count < entries || gone == resident, "all is given up when asked for");
    m->expect(!was_whole || gone > 0 || !resident || !count, "something is given up");
    if (count < MODEL_BLOCKS || m->doubts) /* what the engine reported stays */
        return;
    memset(worker->copies, 0, sizeof worker->copies);
    memset(worker->keyed, 0, sizeof worker->keyed);
    worker->lost = model_lost(worker);
}

/* A chain of any keys, asked of some workers: each one's leading blocks. */
static inline void do_walk(model *m)
{
    static kva_hit hits[KVA_MAX_WORKERS];
    uint64_t keys[MODEL_RUN], asked[KVA_WORKER_WORDS];
    uint32_t plane = (uint32_t)model_random(m, m->planes), first = (uint32_t)model_random(m, MODEL_BLOCKS);
    size_t count = (size_t)model_random(m, MODEL_RUN), cut = count ? (size_t)model_random(m, count + 1) : 0, found = 0;
    for (size_t i = 0; i < count; i++)
        keys[i] = m->keys[(first + i) % MODEL_BLOCKS];
    for (size_t i = 0; i < KVA_WORKER_WORDS; i++)
        asked[i] = model_random(m, 2) ? UINT64_MAX : model_word(m);
    kva_walk walk;
    size_t words = model_random(m, 2) ? KVA_WORKER_WORDS : (size_t)model_random(m, 4);
    int doubted = (int)model_random(m, 2);
    kva_walk_begin(&walk, m->index, plane, asked, words, doubted, hits);
    if (kva_walk_on(&walk, keys, cut))
        kva_walk_on(&walk, keys + cut, count - cut);
    kva_walk_end(&walk);
    for (uint32_t worker = 0; worker < MODEL_WORKERS; worker++) {
        uint32_t blocks = 0;
        if (worker / 64 < words && asked[worker / 64] >> (worker % 64) & 1)
            while (blocks < count && kva_column_holds(m->index, worker, plane, keys[blocks]) >= (doubted ? 1 : 2))
                blocks++;
        if (!blocks)
            continue;
        found++;
        int told = 0;
        for (size_t i = 0; i < walk.hit_count; i++)
            told += hits[i].worker == worker && hits[i].blocks == blocks;
        m->expect(told == 1, "a walk tells each worker's leading blocks, once");
    }
    m->expect(found == walk.hit_count, "a walk tells of nobody else");
}

/* Events are lost, and not: whatever was told stays true, so that no sure claim may be wrong. */
static inline void do_doubt(model *m, model_worker *worker)
{
    kva_column_doubt(m->index, worker->column);
    worker->lost = UINT64_MAX; /* until it is empty, it need not be whole */
}

/* The engine reports some blocks, truly. */
static inline void do_confirm(model *m, model_worker *worker, const model_run *run)
{
    uint64_t held[MODEL_RUN], others[MODEL_RUN];
    size_t held_count = 0, other_count = 0, ended, adopted;
    for (size_t i = 0; i < run->count; i++) {
        uint32_t block = run->blocks[i];
        uint64_t key = model_key(m, worker, block);
        if (worker->copies[0][block] && worker->keyed[block])
            held[held_count++] = key;
        else
            others[other_count++] = key;
    }
    kva_column_confirm(m->index, worker->column, held, held_count, model_random(m, 2) != 0, &ended, &adopted);
    m->expect(ended + adopted <= held_count, "no more ends than is reported");
    m->expect(kva_column_refute(m->index, worker->column, others, other_count) <= other_count, "nor is refuted");
    for (size_t i = 0; i < other_count; i++)
        m->expect(!kva_column_holds(m->index, worker->column->worker, 0, others[i]), "what is refuted is not claimed");
}

static inline void do_settle(model *m, model_worker *worker)
{
    if (model_random(m, 2)) {
        kva_column_settle(m->index, worker->column);
        m->expect(worker->column->counts.doubted == 0, "no doubt is left");
    } else
        kva_column_expire_reported(m->index, worker->column, model_random(m, worker->stored + 2));
}

static inline void do_one(model *m, uint64_t workers)
{
    uint32_t number = (uint32_t)model_random(m, workers);
    model_worker *worker = &m->workers[number];
    uint64_t what = model_random(m, 100);
    if (!worker->column || what == 0) {
        do_add_worker(m);
        return;
    }
    model_run run;
    draw_run(m, &run);
    if (what < 2)
        do_drop_worker(m, worker);
    else if (what < 4)
        do_forget(m, worker);
    else if (what < 5)
        do_forget_all(m, worker);
    else if (what < 5 + m->doubts)
        do_doubt(m, worker);
    else if (what < 5 + 4 * m->doubts)
        do_confirm(m, worker, &run);
    else if (what < 5 + 5 * m->doubts)
        do_settle(m, worker);
    else if (what < 11)
        do_forget_oldest(m, worker);
    else if (what < 16)
        do_wait(m, worker, &run);
    else if (what < 20)
        do_walk(m);
    else if (what < 50)
        do_remove(m, worker, &run);
    else if (what < 60)
        do_join(m, worker, &run);
    else {
        do_add_copies(m, worker, &run);
        if (what < 95)
            do_join(m, worker, &run);
    }
}

static inline size_t kept_by(const model *m, const kva_flat *flat)
{
    size_t kept = 0;
    m->expect(flat->count == 0, "no block stays when its holders go");
    for (uint32_t i = 0; i < KVA_SEGMENTS; i++)
        kept += flat->segments[i].capacity ? cost_of_memory(flat->segments[i].capacity * sizeof(kva_slot)) : 0;
    return kept;
}

/* What is left of memory when nothing is held: tables that stay for the next block, each of them small. */
static inline void check_emptied(model *m)
{
    for (uint32_t i = 0; i < MODEL_WORKERS; i++)
        if (m->workers[i].column)
            do_drop_worker(m, &m->workers[i]);
    check_structure(m);
    m->expect(m->index->sets.live == 0, "no set lives when nobody holds a block");
    size_t kept = 0;
    for (uint32_t plane = 0; plane < m->planes; plane++) {
        kept += kept_by(m, m->index->planes[plane]);
        if (m->index->shadows[plane])
            kept += cost_of_memory(sizeof(kva_flat)) + kept_by(m, m->index->shadows[plane]);
    }
    kept += cost_of_memory(m->index->sets.capacity * sizeof(kva_set)) - cost_of_memory(64 * sizeof(kva_set));
    kept += cost_of_memory(m->index->sets.bucket_count * sizeof(uint32_t)) - cost_of_memory(128 * sizeof(uint32_t));
    m->expect(m->index->budget.live == m->empty_bytes + kept, "an emptied index takes what an empty one does");
}

/* Random calls by up to `workers` workers. `refusing`: every second call finds little memory, or none. */
static inline void check_random_calls(uint64_t seed, uint64_t workers, size_t calls, int refusing, int doubting,
                                      index_expectation expect)
{
    static const size_t allowances[] = {0, 0, 64, 300, 1000, 4000, 30000};
    static model m;
    model_begin(&m, seed, expect);
    m.doubts = (uint64_t)doubting;
    for (size_t call = 0; call < calls; call++) {
        if (refusing && model_random(&m, 2))
            m.index->budget.cap = m.index->budget.used + allowances[model_random(&m, 7)] + 1;
        do_one(&m, workers);
        m.index->budget.cap = 0;
        if (call % (calls / 24) == 0)
            check_model(&m);
    }
    check_model(&m);
    check_emptied(&m);
    kva_index_free(m.index);
}

/* Memory refused while the index is made, and with the first calls: at every place, since every few bytes is one cap. */
static inline void check_small_caps(index_expectation expect)
{
    uint64_t handles[200], keys[200];
    uint32_t woken[200];
    int made = 0;
    for (uint64_t i = 0; i < 200; i++) {
        handles[i] = i + 1;
        keys[i] = kva_mix(i);
    }
    for (size_t cap = sizeof(kva_index) - 100; cap < sizeof(kva_index) + 1500000; cap += cap / 500) {
        kva_index *index = kva_index_new(5, cap);
        if (!index)
            continue;
        kva_column *column = kva_index_add_worker(index, 1, 1), *other = kva_index_add_worker(index, 1, 1);
        kva_column *columns[] = {column, other};
        for (size_t c = 0; c < 2 && columns[c]; c++) {
            kva_column_add_copies(index, columns[c], 0, handles, 200);
            expect(kva_column_join(index, columns[c], handles, keys, 200, woken) == 0, "nobody waits");
            expect(index->budget.used <= cap, "the cap holds");
            made += columns[c]->counts.refused == 0;
        }
        size_t held = index->planes[0]->count;
        expect(!column || held + column->counts.refused >= 200, "what was refused is counted");
        for (size_t c = 0; c < 2 && columns[c]; c++)
            kva_index_drop_worker(index, columns[c]);
        expect(index->planes[0]->count == 0 && index->sets.live == 0, "nothing stays under a cap either");
        kva_index_free(index);
    }
    expect(made > 10, "the largest caps suffice");
    kva_index_free(NULL);
}

/* 100,000 blocks on each of two workers and a third of them on a third: growth and shrinking of large tables. */
static inline void check_many_blocks(index_expectation expect)
{
    enum { BLOCKS = 100000, RUN = 500 };
    static uint64_t handles[BLOCKS], keys[BLOCKS];
    static uint32_t woken[RUN];
    static model m;
    model_begin(&m, 9, expect);
    kva_index *index = m.index;
    kva_column *columns[3];
    for (size_t i = 0; i < BLOCKS; i++) {
        handles[i] = kva_mix(i ^ 77);
        keys[i] = kva_mix(i);
    }
    for (size_t c = 0; c < 3; c++) {
        columns[c] = kva_index_add_worker(index, 1, 1);
        for (size_t at = 0; at < (c == 2 ? BLOCKS / 4 : BLOCKS); at += RUN) {
            kva_column_add_copies(index, columns[c], 0, handles + at, RUN);
            kva_column_join(index, columns[c], handles + at, keys + at, RUN, woken);
        }
    }
    check_structure(&m);
    size_t full = index->budget.used;
    expect(index->planes[0]->count == BLOCKS, "all blocks are there");
    for (size_t at = 0; at < BLOCKS; at += RUN)
        if (at / RUN % 10)
            kva_column_remove(index, columns[0], 0, handles + at, RUN);
    kva_column_forget_oldest(index, columns[1], BLOCKS / 2);
    check_structure(&m);
    expect(columns[0]->counts.resident == BLOCKS / 10, "removed blocks are gone");
    for (size_t i = 0; i < BLOCKS; i++) {
        expect(index_holds(&m, 0, 0, keys[i]) == (i / RUN % 10 == 0), "the first worker holds what it kept");
        expect(index_holds(&m, 0, 2, keys[i]) == (i < BLOCKS / 4), "the third worker holds what it did");
    }
    for (size_t c = 0; c < 3; c++)
        kva_index_drop_worker(index, columns[c]);
    check_structure(&m);
    expect(index->planes[0]->count == 0 && index->sets.live == 0, "nothing stays");
    expect(index->budget.used < m.empty_bytes + full / 20, "memory goes back");
    kva_index_free(index);
}

/* Stamps go around after 2^38 blocks: what is older stays older. */
static inline void check_stamps_go_around(index_expectation expect)
{
    uint64_t handles[400], keys[400];
    uint32_t woken[400];
    kva_index *index = kva_index_new(1, 0);
    kva_column *column = kva_index_add_worker(index, 1, 1);
    for (uint64_t i = 0; i < 400; i++) {
        handles[i] = i;
        keys[i] = kva_mix(i);
    }
    for (size_t half = 0; half < 2; half++) {
        index->ticks = ((UINT64_C(1) << 32) - 8 + 8 * half) * KVA_TICKS_PER_STAMP;
        kva_column_add_copies(index, column, 0, handles + 200 * half, 200);
        kva_column_join(index, column, handles + 200 * half, keys + 200 * half, 200, woken);
    }
    expect(kva_column_forget_oldest(index, column, 200) == 200, "half of them go");
    size_t newer = 0;
    for (size_t i = 200; i < 400; i++)
        newer += kva_flat_slot(index->planes[0], keys[i]) != NULL;
    expect(newer == 200, "the older half goes, though its stamps are larger");
    kva_index_free(index);
}

/* Ages at removal are counted by their size in stamps, across the wrap-around, and only where a claim goes. */
static inline void check_removal_ages(index_expectation expect)
{
    static const uint32_t waits[] = {0, 1, 2, 3, 4, 1u << 20, UINT32_MAX};
    static const uint32_t bins[] = {0, 1, 2, 2, 3, 21, 31};
    uint32_t woken[1], age, sample[8];
    kva_index *index = kva_index_new(1, 0);
    kva_column *column = kva_index_add_worker(index, 1, 1);
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        uint64_t handle = i + 1, key = kva_mix(handle);
        index->ticks = (UINT64_C(0xfffffffe) - i) * KVA_TICKS_PER_STAMP;
        kva_column_store(index, column, 0, &handle, &key, 1, woken);
        index->ticks += (uint64_t)waits[i] * KVA_TICKS_PER_STAMP;
        expect(kva_column_age(index, column, handle, &age) && age == waits[i], "a block's age");
        expect(kva_column_sample_ages(index, column, sample, 8) <= 1, "one block is one age at most");
        uint32_t before = column->removal_ages[bins[i]];
        kva_column_remove(index, column, 0, &handle, 1);
        expect(column->removal_ages[bins[i]] == before + 1, "its bin counts the removal");
        kva_column_remove(index, column, 0, &handle, 1);
        expect(column->removal_ages[bins[i]] == before + 1, "an unknown removal has no age");
        expect(!kva_column_age(index, column, handle, &age), "what is gone has no age");
    }
    kva_column_forget_all(index, column);
    for (uint32_t i = 0; i < KVA_AGE_BINS; i++)
        expect(column->removal_ages[i] == 0, "a new life begins without removals");
    kva_index_free(index);
}

/* Times of use: codes of ages are theirs again, a table of times holds what a plain one does, and no more than it may. */
static inline void check_uses(index_expectation expect)
{
    enum { PRINTS = 500, MOST = 200 };
    for (uint32_t code = 0; code < KVA_USE_BINS; code++)
        expect(kva_age_code(kva_age_of_code(code)) == code, "a code's least age has that code");
    expect(kva_age_code(UINT32_MAX) == KVA_USE_BINS - 1, "the last code is that of the largest age");
    kva_budget budget = {0};
    kva_uses uses = {0};
    uint32_t times[PRINTS] = {0}, known = 0;
    for (uint32_t now = 1; now < 60000; now++) {
        uint32_t which = (uint32_t)(kva_mix(now) % PRINTS), print = (which + 1) * 0x01000193u;
        if (kva_mix(now + 7) % 3 == 0) {
            known -= times[which] != 0;
            times[which] = 0;
            kva_uses_drop(&uses, print);
        } else if (times[which] || known < MOST - 1) {
            known += times[which] == 0;
            times[which] = now;
            expect(kva_uses_put(&uses, &budget, print, now, now, MOST), "there is memory for a time");
        }
        const uint32_t *time = kva_uses_find(&uses, print);
        expect(time ? *time == times[which] : !times[which], "a time is the last one noted");
        expect(uses.count == known, "as many times as were noted and not dropped");
    }
    for (uint32_t print = 1u << 31; uses.count < MOST; print++)
        kva_uses_put(&uses, &budget, print, 60000, 60000, MOST);
    kva_uses_put(&uses, &budget, 7, 60001, 60001, MOST);
    expect(uses.count == MOST / 2 + 1, "beyond the most the older half goes");
    expect(kva_uses_find(&uses, 7) != NULL, "and not the new one");
    kva_uses_free(&uses, &budget);
    kva_budget_free(&budget);
}

static inline void check_index(index_expectation expect)
{
    check_small_caps(expect);
    check_random_calls(1, 3, 20000, 0, 0, expect);
    check_random_calls(2, 3, 20000, 1, 0, expect);
    check_random_calls(3, MODEL_WORKERS, 20000, 0, 0, expect);
    check_random_calls(4, MODEL_WORKERS, 20000, 1, 0, expect);
    check_random_calls(16, 3, 20000, 0, 1, expect);
    check_random_calls(17, MODEL_WORKERS, 20000, 1, 1, expect);
    for (uint64_t seed = 5; seed < 15; seed++)
        check_random_calls(seed, 1 + seed % 8, 2400, seed % 2 == 0, seed % 3 == 0, expect);
    check_many_blocks(expect);
    check_stamps_go_around(expect);
    check_removal_ages(expect);
    check_uses(expect);
}

#endif
