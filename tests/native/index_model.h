/* A naive model of the fleet index, for the kernels' driver: what each worker's events said, in plain arrays.

   The index holds exactly what the model does for a worker of whom nothing was refused or given up since it was last
   empty, and never more for any. Handles and keys are chosen so that they meet: few tables, few segments, many homes
   at the very end, where clusters go around. */
#ifndef INDEX_MODEL_H
#define INDEX_MODEL_H

#include "index.h"

#include <stdlib.h>
#include <string.h>

typedef void (*index_expectation)(int holds, const char *what);

enum { MODEL_WORKERS = 160, MODEL_PLANES = 3, MODEL_BLOCKS = 300 };

typedef struct {
    kva_column *column; /* NULL: nobody has this number */
    int counting;
    uint32_t shift; /* handle i means key i + shift */
    uint32_t copies[MODEL_PLANES][MODEL_BLOCKS];
    uint8_t keyed[MODEL_BLOCKS], waited[MODEL_BLOCKS];
    uint64_t stored, touched; /* blocks of stores and of removals */
    uint64_t lost;            /* refused and forgotten when it was last empty */
} model_worker;

typedef struct {
    kva_index *index;
    index_expectation expect;
    uint64_t state;
    uint32_t planes;
    size_t empty_bytes;
    uint64_t doubts; /* whether events are lost now and then: 0 or 1 */
    uint64_t handles[MODEL_BLOCKS], keys[MODEL_BLOCKS];
    model_worker workers[MODEL_WORKERS];
} model;

static inline uint64_t model_random(model *m, uint64_t below)
{
    m->state ^= m->state << 13;
    m->state ^= m->state >> 7;
    m->state ^= m->state << 17;
    return (m->state >> 11) % below;
}

static inline uint64_t model_word(model *m)
{
    return model_random(m, UINT64_C(1) << 32) << 32 | model_random(m, UINT64_C(1) << 32);
}

/* Few segments; in each, homes at the end, at the start and anywhere. */
static inline uint64_t model_make_key(model *m, uint64_t number)
{
    static const uint64_t segments[] = {0, 1, 77, 255};
    static const uint64_t homes[] = {0, UINT32_MAX, UINT32_MAX - 1};
    uint64_t home = model_random(m, 2) ? homes[model_random(m, 3)] : model_random(m, UINT64_C(1) << 32);
    return segments[model_random(m, 4)] << 56 | home << 24 | number;
}

/* Of three tables; every other one with its home at the end. */
static inline uint64_t model_make_handle(model *m, uint64_t number)
{
    for (;;) {
        uint64_t handle = model_word(m), mixed = kva_mix(handle);
        int at_end = (mixed >> 28 & UINT32_MAX) >> 27 == 31;
        if (mixed >> 60 < 3 && (at_end || number % 2))
            return handle;
    }
}

static inline void model_begin(model *m, uint64_t seed, index_expectation expect)
{
    memset(m, 0, sizeof *m);
    m->state = seed;
    m->expect = expect;
    for (uint32_t i = 0; i < MODEL_BLOCKS; i++) {
        m->keys[i] = model_make_key(m, i);
        m->handles[i] = model_make_handle(m, i);
    }
    m->index = kva_index_new(seed, 0);
    expect(m->index != NULL, "an empty index");
    for (m->planes = 1; m->planes < MODEL_PLANES; m->planes++)
        expect(kva_index_add_plane(m->index) == m->planes, "a plane");
    m->empty_bytes = m->index->budget.live;
}

static inline uint64_t model_key(const model *m, const model_worker *worker, uint32_t block)
{
    return m->keys[(block + worker->shift) % MODEL_BLOCKS];
}

static inline int model_is_resident(const model_worker *worker, uint32_t block)
{
    for (uint32_t plane = 0; plane < MODEL_PLANES; plane++)
        if (worker->copies[plane][block])
            return 1;
    return 0;
}

static inline uint64_t model_lost(const model_worker *worker)
{
    return worker->column->counts.refused + worker->column->counts.forgotten;
}

/* Whether the index has to hold exactly what the model does. */
static inline int model_is_whole(const model_worker *worker)
{
    return model_lost(worker) == worker->lost;
}

static inline int index_holds(const model *m, uint32_t plane, uint32_t worker, uint64_t key)
{
    kva_slot *slot = kva_flat_slot(m->index->planes[plane], key);
    return slot && kva_set_has(&m->index->sets, slot->set, worker);
}

/* Comparison */

static inline void check_worker(const model *m, uint32_t number)
{
    const model_worker *worker = &m->workers[number];
    const kva_counts *counts = &worker->column->counts;
    int whole = model_is_whole(worker);
    int64_t resident = 0, unkeyed = 0, entries = 0;
    for (uint32_t block = 0; block < MODEL_BLOCKS; block++) {
        uint64_t key = 0, expected = model_key(m, worker, block);
        int has_key = kva_column_key(worker->column, m->handles[block], &key), held = model_is_resident(worker, block);
        if (has_key)
            m->expect(worker->keyed[block] && key == expected, "a key is the one that was given");
        else
            m->expect(!whole || !worker->keyed[block], "a given key is known");
        unkeyed += held && !worker->keyed[block];
        entries += held || worker->waited[block];
        for (uint32_t plane = 0; plane < m->planes; plane++) {
            int truth = worker->copies[plane][block] && worker->keyed[block];
            int claimed = index_holds(m, plane, number, expected);
            m->expect(!claimed || truth, "nothing is claimed that is not so");
            m->expect(!whole || claimed || !truth, "all is claimed of a worker of whom nothing was lost");
            resident += worker->copies[plane][block] != 0;
        }
    }
    m->expect(counts->stored == worker->stored, "stored blocks are counted");
    m->expect(counts->removed + counts->unknown_removals == worker->touched, "removed blocks are counted");
    if (!whole)
        return;
    m->expect(counts->resident == resident, "resident blocks are counted");
    m->expect(counts->unkeyed == unkeyed, "blocks without a key are counted");
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        entries -= worker->column->tables[i].count;
    m->expect(entries == 0, "no entry stays without a reason");
}

/* Structure: what holds whatever happened */

static inline size_t cost_of_memory(size_t bytes)
{
    size_t whole = bytes + 16; /* memory.c puts a header in front */
    return whole >= 3072 ? (whole + 4095) / 4096 * 4096 : (whole + 15) / 16 * 16 + 16;
}

static inline size_t check_table(const model *m, const kva_handles *table)
{
    size_t bytes = 0;
    uint32_t entries = 0, others = 0;
    for (uint32_t place = 0; place < table->capacity; place++) {
        if (!table->marks[place])
            continue;
        entries++;
        m->expect(kva_handles_find(table, table->entries[place].handle) == place, "every entry is found");
    }
    for (uint32_t place = 0; place < table->other_capacity; place++)
        others += table->others[place].copies != 0;
    m->expect(entries == table->count && others == table->other_count, "entries are counted");
    if (table->capacity)
        bytes += cost_of_memory((size_t)table->capacity * 17);
    if (table->other_capacity)
        bytes += cost_of_memory(table->other_capacity * sizeof(kva_copies));
    return bytes;
}

static inline size_t check_tables(const model *m, const kva_column *column)
{
    size_t bytes = cost_of_memory(sizeof *column) + check_table(m, &column->reported);
    int64_t doubted = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        const kva_handles *table = &column->tables[i];
        bytes += check_table(m, table);
        for (uint32_t place = 0; place < table->capacity; place++) {
            uint8_t mark = table->marks[place];
            m->expect(!mark || !kva_is_idle(mark), "no entry is idle");
            m->expect(!(mark & KVA_DOUBT) || kva_is_resident(mark), "only what is held is in doubt");
            doubted += (mark & KVA_DOUBT) != 0;
        }
    }
    m->expect(doubted == column->counts.doubted, "doubts are counted");
    return bytes;
}

static inline size_t check_plane(const model *m, kva_flat *flat, uint32_t *named)
{
    size_t bytes = cost_of_memory(sizeof *flat), slots = 0;
    for (uint32_t i = 0; i < KVA_SEGMENTS; i++) {
        const kva_segment *segment = &flat->segments[i];
        uint32_t count = 0;
        for (uint32_t at = 0; at < segment->capacity; at++) {
            kva_slot *slot = &segment->slots[at];
            if (slot->set == KVA_EMPTY_SET)
                continue;
            count++;
            named[slot->set]++;
            m->expect(kva_flat_slot(flat, slot->key) == slot, "every slot is found");
        }
        m->expect(count == segment->count, "slots are counted");
        slots += count;
        if (segment->capacity)
            bytes += cost_of_memory(segment->capacity * sizeof(kva_slot));
    }
    m->expect(slots == flat->count, "a plane's blocks are counted");
    return bytes;
}

static inline size_t check_sets(const model *m, const uint32_t *named)
{
    const kva_sets *sets = &m->index->sets;
    size_t bytes = cost_of_memory(sets->capacity * sizeof(kva_set));
    bytes += cost_of_memory(sets->bucket_count * sizeof(uint32_t)) + cost_of_memory(KVA_SET_STEPS * sizeof(kva_set_step));
    uint32_t live = 0;
    for (uint32_t i = 1; i < sets->count; i++) {
        const kva_set *set = &sets->sets[i];
        m->expect(set->length ? set->refs == named[i] && named[i] > 0 : named[i] == 0, "a set lives while slots name it");
        live += set->length != 0;
        if (set->length > 1)
            bytes += cost_of_memory(set->length * sizeof(uint64_t));
        if (set->length) {
            const uint64_t *words = kva_set_words(set);
            m->expect(words[0] && words[set->length - 1], "a set stores no empty word at its ends");
        }
    }
    m->expect(live == sets->live, "sets are counted");
    return bytes;
}

static inline void check_structure(const model *m)
{
    uint32_t *named = calloc(m->index->sets.count, sizeof *named);
    if (!named)
        abort();
    size_t bytes = 0;
    for (uint32_t plane = 0; plane < m->index->plane_count; plane++) {
        bytes += check_plane(m, m->index->planes[plane], named);
        if (m->index->shadows[plane])
            bytes += check_plane(m, m->index->shadows[plane], named);
    }
    bytes += check_sets(m, named);
    for (uint32_t i = 0; i < KVA_MAX_WORKERS; i++)
        if (m->index->columns[i])
            bytes += check_tables(m, m->index->columns[i]);
    m->expect(bytes == m->index->budget.live, "every byte taken is accounted for");
    m->expect(bytes <= m->index->budget.used, "what is held covers what is live");
    free(named);
}

static inline void check_model(const model *m)
{
    check_structure(m);
    for (uint32_t i = 0; i < MODEL_WORKERS; i++)
        if (m->workers[i].column)
            check_worker(m, i);
}

#endif
