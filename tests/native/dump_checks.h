/* Checks of a column's dump for the kernels' driver: what is loaded is what was dumped, and no damaged byte or length
   is read outside, leaks, or leaves anything behind. */
#ifndef DUMP_CHECKS_H
#define DUMP_CHECKS_H

#include "batch_checks.h"
#include "bytes.h"
#include "index.h"

enum { DUMP_HANDLES = 300, DUMP_PLANES = 3 };

static inline uint64_t dump_random(void)
{
    static uint64_t state = 7;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static inline kva_index *index_of_planes(void)
{
    kva_index *index = kva_index_new(5, 0);
    if (!index)
        abort();
    while (index->plane_count < DUMP_PLANES)
        if (kva_index_add_plane(index) == KVA_MAX_PLANES)
            abort();
    return index;
}

static inline void expect_touched(size_t held)
{
    if (held != 10)
        abort();
}

/* Blocks in every state: one copy, many, elsewhere, without a key, waited for, in doubt, confirmed, refuted, reported. */
static inline kva_column *full_column(kva_index *index)
{
    kva_column *column = kva_index_add_worker(index, 1, 1);
    if (!column)
        abort();
    uint64_t handles[DUMP_HANDLES], keys[DUMP_HANDLES], reported[20];
    uint32_t woken[DUMP_HANDLES];
    size_t ended, adopted;
    for (size_t i = 0; i < DUMP_HANDLES; i++) {
        handles[i] = dump_random();
        keys[i] = dump_random();
    }
    for (size_t i = 0; i < sizeof reported / sizeof *reported; i++)
        reported[i] = dump_random();
    kva_column_add_copies(index, column, 0, handles, 200);
    kva_column_add_copies(index, column, 1, handles + 50, 100);
    kva_column_add_copies(index, column, 2, handles + 190, 20);
    for (int i = 0; i < 9; i++)
        kva_column_add_copies(index, column, 0, handles + 10, 30);
    kva_column_join(index, column, handles, keys, 180, woken);
    kva_column_wait(column, handles[5]);
    kva_column_wait(column, 17);
    kva_column_doubt(index, column);
    kva_column_confirm(index, column, keys, 12, 1, &ended, &adopted);
    kva_column_refute(index, column, keys + 20, 7);
    kva_column_add_copies(index, column, 0, handles + 150, DUMP_HANDLES - 150);
    kva_column_join(index, column, handles + 150, keys + 150, DUMP_HANDLES - 150, woken);
    for (size_t i = 150; i < DUMP_HANDLES; i += 10)
        expect_touched(kva_column_touch(index, column, keys + i, 10, 3));
    kva_column_confirm(index, column, reported, 20, 1, &ended, &adopted);
    kva_column_refute(index, column, reported, 3);
    kva_column_remove(index, column, 0, handles + 40, 3);
    return column;
}

static inline uint8_t *dump_of(kva_index *index, const kva_column *column, size_t *length)
{
    *length = kva_dump_size(column);
    uint8_t *bytes = malloc(*length);
    if (!bytes)
        abort();
    kva_dump(index, column, bytes);
    return bytes;
}

static inline kva_dump_fault load_exactly(kva_index *index, kva_column *column, const uint8_t *bytes, size_t length)
{
    static const uint32_t planes[DUMP_PLANES] = {0, 1, 2};
    uint8_t *copy = exact_copy(bytes, length);
    kva_dump_fault fault = kva_load(index, column, copy, length, planes, DUMP_PLANES);
    free(copy);
    return fault;
}

static inline size_t claims_in(const kva_index *index)
{
    size_t claims = 0;
    for (uint32_t i = 0; i < index->plane_count; i++)
        claims += index->planes[i]->count + (index->shadows[i] ? index->shadows[i]->count : 0);
    return claims;
}

static inline void check_loaded(kva_index *from, const kva_column *column, const uint8_t *bytes, size_t length,
                                expectation expect)
{
    kva_index *index = index_of_planes();
    kva_column *loaded = kva_index_add_worker(index, 1, 1);
    expect(load_exactly(index, loaded, bytes, length) == KVA_DUMP_OK, "a dump loads");
    expect(memcmp(&loaded->counts, &column->counts, sizeof column->counts) == 0, "a dump keeps every count");
    expect(claims_in(index) == claims_in(from), "a dump keeps every claim");
    expect(loaded->uses.count == column->uses.count && loaded->uses.count > 20, "a dump keeps every time of use");
    expect(memcmp(loaded->use_ages, column->use_ages, sizeof column->use_ages) == 0, "and ages at removal");
    expect(memcmp(loaded->removal_ages, column->removal_ages, sizeof column->removal_ages) == 0, "by stamps, too");
    expect(kva_dump_size(loaded) == length, "a dump of what was loaded is as long");
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        for (uint32_t place = 0; place < column->tables[i].capacity; place++) {
            uint64_t key;
            if (column->tables[i].marks[place] & KVA_KEYED)
                expect(kva_column_key(loaded, column->tables[i].entries[place].handle, &key) &&
                           key == column->tables[i].entries[place].key,
                       "a dump keeps every key");
        }
    expect(load_exactly(index, loaded, bytes, length) == KVA_DUMP_NOT_EMPTY, "a column with blocks takes no dump");
    kva_index_drop_worker(index, loaded);
    expect(claims_in(index) == 0, "a loaded column goes without a trace");
    kva_index_free(index);
}

static inline void check_damaged(const uint8_t *bytes, size_t length, expectation expect)
{
    kva_index *index = index_of_planes();
    kva_column *column = kva_index_add_worker(index, 1, 1);
    for (size_t shorter = 0; shorter < length; shorter += 1 + shorter / 8)
        expect(load_exactly(index, column, bytes, shorter) == KVA_DUMP_LENGTH, "a truncated dump is refused");
    for (int i = 0; i < 4000; i++) {
        uint8_t *damaged = exact_copy(bytes, length);
        for (uint64_t hits = 1 + dump_random() % 3; hits; hits--)
            damaged[dump_random() % (i % 2 ? length : 80)] ^= (uint8_t)(1u << dump_random() % 8);
        if (load_exactly(index, column, damaged, length) == KVA_DUMP_OK)
            kva_column_forget_all(index, column);
        expect(claims_in(index) == 0 && !column->counts.resident, "nothing is left of a dump that is refused");
        free(damaged);
    }
    kva_index_free(index);
}

/* Without memory nothing is loaded, or claims are refused and counted. */
static inline void check_memory(const uint8_t *bytes, size_t length, expectation expect)
{
    for (size_t cap = 16; cap < 200; cap += 3) {
        kva_index *index = index_of_planes();
        kva_column *column = kva_index_add_worker(index, 1, 1);
        index->budget.cap = index->budget.used + cap * 256;
        uint64_t refused = kva_load64le(bytes + 32);
        if (load_exactly(index, column, bytes, length) == KVA_DUMP_MEMORY)
            expect(claims_in(index) == 0 && !column->counts.resident, "a dump that does not fit is not loaded");
        else
            expect(column->counts.refused >= refused, "claims that do not fit are counted");
        kva_index_free(index);
    }
}

static inline void check_dumps(expectation expect)
{
    kva_index *index = index_of_planes();
    kva_column *column = full_column(index);
    size_t length;
    uint8_t *bytes = dump_of(index, column, &length);
    check_loaded(index, column, bytes, length, expect);
    check_damaged(bytes, length, expect);
    check_memory(bytes, length, expect);
    free(bytes);
    kva_index_free(index);
}

#endif
