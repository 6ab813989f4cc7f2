/* What is in doubt after a loss of events, and how doubts end. */
#include "index.h"

static int has(kva_index *index, kva_flat *flat, uint64_t key, uint32_t worker)
{
    kva_slot *slot = flat ? kva_flat_slot(flat, key) : NULL;
    return slot && kva_set_has(&index->sets, slot->set, worker);
}

/* A claim goes into the shadow of its plane, as old as it is. Without memory for it there it goes altogether. */
static void cast_shadow(kva_index *index, kva_column *column, uint32_t plane, uint64_t key)
{
    if (!has(index, index->planes[plane], key, column->worker))
        return;
    uint32_t stamp = kva_flat_slot(index->planes[plane], key)->stamp;
    kva_take_claim(index, column, index->planes[plane], key);
    kva_flat *shadow = kva_index_shadow(index, plane);
    if (!shadow || !kva_flat_add(shadow, key, column->worker, stamp))
        column->counts.refused++;
}

static void doubt_entry(kva_index *index, kva_column *column, kva_handles *table, uint32_t place)
{
    uint8_t mark = table->marks[place];
    if (!kva_is_resident(mark))
        return;
    if (!(mark & KVA_DOUBT))
        column->counts.doubted++;
    table->marks[place] |= KVA_DOUBT;
    if (!(mark & KVA_KEYED))
        return;
    if (mark & KVA_COPIES)
        cast_shadow(index, column, 0, table->entries[place].key);
    if (!(mark & KVA_OTHERS))
        return;
    for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
        if (kva_copies_get(table, place, plane))
            cast_shadow(index, column, plane, table->entries[place].key);
}

void kva_column_doubt(kva_index *index, kva_column *column)
{
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        for (uint32_t place = 0; place < column->tables[i].capacity; place++)
            if (column->tables[i].marks[place])
                doubt_entry(index, column, &column->tables[i], place);
    column->unsure = 0;
    kva_doubt_reported(index, column);
}

/* Whether the engine's own word took a block out of doubt: its claims stand in the planes themselves. */
static int is_confirmed(kva_index *index, const kva_column *column, const kva_handles *table, uint32_t place)
{
    uint8_t mark = table->marks[place];
    return mark & KVA_KEYED && mark & KVA_COPIES && !(mark & KVA_OTHERS) &&
           has(index, index->planes[0], table->entries[place].key, column->worker);
}

static size_t settle_table(kva_index *index, kva_column *column, kva_handles *table)
{
    size_t gone = 0;
    for (uint32_t place = 0; place < table->capacity;) {
        uint8_t *mark = &table->marks[place];
        if (*mark & KVA_DOUBT && is_confirmed(index, column, table, place)) {
            kva_copies_set(table, place, 0, 1); /* how many there were was in doubt as well */
            *mark &= (uint8_t)~KVA_DOUBT;
            column->counts.doubted--;
        } else if (*mark & KVA_DOUBT) {
            gone++;
            if (kva_column_forget_entry(index, column, table, place, NULL))
                continue; /* another entry may have moved here */
        }
        place++;
    }
    kva_handles_shrink(table);
    return gone;
}

size_t kva_column_settle(kva_index *index, kva_column *column)
{
    size_t gone = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        gone += settle_table(index, column, &column->tables[i]);
    return gone;
}

void kva_column_confirm(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, int certain,
                        size_t *ended, size_t *adopted)
{
    *ended = *adopted = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t known = kva_handles_find(&column->reported, keys[i]);
        int in_doubt = has(index, index->shadows[0], keys[i], column->worker);
        if (known != KVA_NOT_FOUND)
            column->reported.entries[known].key = column->counts.stored;
        if (has(index, index->planes[0], keys[i], column->worker))
            continue;
        if (in_doubt && (certain || known == KVA_NOT_FOUND)) {
            if (!kva_flat_add(index->planes[0], keys[i], column->worker, kva_index_stamp(index)))
                continue;
            kva_take_claim(index, column, index->shadows[0], keys[i]);
            if (known != KVA_NOT_FOUND)
                column->unsure = 0;
            (*ended)++;
        } else if (!in_doubt) {
            kva_flat *flat = certain ? index->planes[0] : kva_index_shadow(index, 0);
            if (!flat || !kva_flat_add(flat, keys[i], column->worker, kva_index_stamp(index)))
                continue;
            uint32_t place = kva_handles_put(&column->reported, keys[i]);
            if (place == KVA_NOT_FOUND) { /* a claim nobody could take back */
                kva_take_claim(index, column, flat, keys[i]);
                continue;
            }
            column->reported.entries[place].key = column->counts.stored;
            column->unsure = 0;
            (*adopted)++;
        }
    }
}

size_t kva_column_refute(kva_index *index, kva_column *column, const uint64_t *keys, size_t count)
{
    size_t gone = 0;
    for (size_t i = 0; i < count; i++) {
        if (!has(index, index->shadows[0], keys[i], column->worker))
            continue;
        kva_take_claim(index, column, index->shadows[0], keys[i]);
        gone++;
    }
    return gone;
}

void kva_doubt_reported(kva_index *index, kva_column *column)
{
    kva_handles *table = &column->reported;
    if (!table->count || column->unsure)
        return;
    for (uint32_t place = 0; place < table->capacity; place++)
        if (table->marks[place])
            cast_shadow(index, column, 0, table->entries[place].handle);
    column->unsure = 1;
}

static void take_back(kva_index *index, kva_column *column, uint32_t place)
{
    kva_unclaim(index, column, 0, column->reported.entries[place].handle, 1);
    kva_handles_erase(&column->reported, place);
}

size_t kva_column_expire_reported(kva_index *index, kva_column *column, uint64_t stored)
{
    kva_handles *table = &column->reported;
    size_t gone = 0;
    for (uint32_t place = 0; place < table->capacity;) {
        if (table->marks[place] && table->entries[place].key < stored) {
            take_back(index, column, place);
            gone++;
        } else
            place++;
    }
    kva_handles_shrink(table);
    return gone;
}

void kva_drop_reported(kva_index *index, kva_column *column)
{
    kva_column_expire_reported(index, column, UINT64_MAX);
    kva_handles_free(&column->reported);
}

int kva_column_holds(kva_index *index, uint32_t worker, uint32_t plane, uint64_t key)
{
    if (has(index, index->planes[plane], key, worker))
        return 2;
    return has(index, index->shadows[plane], key, worker) ? 1 : 0;
}
