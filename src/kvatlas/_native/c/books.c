/* How a worker's events change its column and the planes. */
#include "index.h"

#include <string.h>

enum { AHEAD = 12 }; /* blocks whose memory is asked for before their turn */

static kva_handles *table_of(kva_column *column, uint64_t handle)
{
    return &column->tables[kva_table_of(handle)];
}

static void prefetch_handle(kva_column *column, uint64_t handle)
{
    kva_handles_prefetch(table_of(column, handle), handle);
}

void kva_claim(kva_index *index, kva_column *column, uint32_t plane, uint64_t key, int in_doubt)
{
    kva_flat *flat = in_doubt ? kva_index_shadow(index, plane) : index->planes[plane];
    if (!flat || !kva_flat_add(flat, key, column->worker, kva_index_stamp(index)))
        column->counts.refused++;
    if (plane == 0 && column->reported.count) { /* an event names it now */
        uint32_t place = kva_handles_find(&column->reported, key);
        if (place == KVA_NOT_FOUND)
            return;
        kva_handles_erase(&column->reported, place);
        if (!in_doubt && index->shadows[0])
            kva_take_claim(index, column, index->shadows[0], key);
    }
}

/* Without memory for the set of those who stay, the block is given up for them, too, and counted: a claim too few, and
   they are told. */
void kva_take_claim(kva_index *index, kva_column *column, kva_flat *flat, uint64_t key)
{
    if (flat == index->planes[0])
        kva_uses_drop(&column->uses, kva_print(key));
    if (kva_flat_discard(flat, key, column->worker))
        return;
    kva_slot *slot = kva_flat_slot(flat, key);
    const kva_set *set = &index->sets.sets[slot->set];
    for (uint32_t i = 0; i < set->length; i++)
        for (uint64_t bits = kva_set_words(set)[i]; bits; bits &= bits - 1) {
            uint32_t worker = (set->first + i) * 64 + (uint32_t)__builtin_ctzll(bits);
            if (worker != column->worker)
                index->columns[worker]->counts.refused++;
        }
    kva_flat_drop(flat, slot);
}

void kva_unclaim(kva_index *index, kva_column *column, uint32_t plane, uint64_t key, int in_doubt)
{
    kva_take_claim(index, column, index->planes[plane], key);
    if (in_doubt && index->shadows[plane])
        kva_take_claim(index, column, index->shadows[plane], key);
}

static void drop_if_idle(kva_handles *table, uint32_t place)
{
    if (kva_is_idle(table->marks[place]))
        kva_handles_erase(table, place);
}

/* A place whose block may just have lost its last copy in every plane. */
static void leave(kva_column *column, kva_handles *table, uint32_t place)
{
    uint8_t *mark = &table->marks[place];
    if (kva_is_resident(*mark))
        return;
    if (!(*mark & KVA_KEYED))
        column->counts.unkeyed--;
    if (*mark & KVA_DOUBT)
        column->counts.doubted--;
    *mark &= (uint8_t)~(KVA_KEYED | KVA_DOUBT);
    drop_if_idle(table, place);
}

static void forget_in_plane(kva_index *index, kva_column *column, kva_handles *table, uint32_t place, uint32_t plane);

/* A block in doubt is announced again: that copy is all that is known of it now, and it keeps its meaning. */
static void renew(kva_index *index, kva_column *column, kva_handles *table, uint32_t place)
{
    forget_in_plane(index, column, table, place, 0);
    for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
        forget_in_plane(index, column, table, place, plane);
    if (!(table->marks[place] & KVA_KEYED))
        column->counts.unkeyed--; /* counted again with the new copy */
    table->marks[place] &= (uint8_t)~KVA_DOUBT;
    column->counts.doubted--;
}

static void add_copy(kva_index *index, kva_column *column, uint32_t plane, uint64_t handle)
{
    kva_handles *table = table_of(column, handle);
    uint32_t place = kva_handles_put(table, handle);
    if (place == KVA_NOT_FOUND) {
        column->counts.refused++;
        return;
    }
    if (table->marks[place] & KVA_DOUBT)
        renew(index, column, table, place);
    uint8_t before = table->marks[place];
    uint32_t copies = kva_copies_get(table, place, plane);
    if (copies && (!column->counting || copies == UINT32_MAX))
        return;
    if (!kva_copies_set(table, place, plane, copies + 1)) {
        column->counts.refused++;
        drop_if_idle(table, place);
        return;
    }
    if (copies)
        return;
    column->counts.resident++;
    if (!kva_is_resident(before) && !(before & KVA_KEYED))
        column->counts.unkeyed++;
    if (table->marks[place] & KVA_KEYED)
        kva_claim(index, column, plane, table->entries[place].key, 0);
}

void kva_column_add_copies(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles, size_t count)
{
    index->ticks += count;
    column->counts.stored += count;
    kva_column_prefetch(column, handles, count);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            prefetch_handle(column, handles[i + AHEAD]);
        add_copy(index, column, plane, handles[i]);
    }
}

static void give_key(kva_index *index, kva_column *column, kva_handles *table, uint32_t place, uint64_t key)
{
    table->entries[place].key = key;
    table->marks[place] |= KVA_KEYED;
    column->counts.unkeyed--;
    int in_doubt = table->marks[place] & KVA_DOUBT;
    if (table->marks[place] & KVA_COPIES)
        kva_claim(index, column, 0, key, in_doubt);
    if (!(table->marks[place] & KVA_OTHERS))
        return;
    for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
        if (kva_copies_get(table, place, plane))
            kva_claim(index, column, plane, key, in_doubt);
}

/* Give a block its key, where it has none. 1 when somebody waited for it, who then no longer waits. */
static int join_one(kva_index *index, kva_column *column, uint64_t handle, uint64_t key)
{
    kva_handles *table = table_of(column, handle);
    uint32_t place = kva_handles_find(table, handle);
    if (place == KVA_NOT_FOUND)
        return 0;
    uint8_t mark = table->marks[place];
    if (!(mark & KVA_KEYED) && kva_is_resident(mark))
        give_key(index, column, table, place, key);
    if (!(mark & KVA_WAITED))
        return 0;
    table->marks[place] &= (uint8_t)~KVA_WAITED;
    drop_if_idle(table, place);
    return 1;
}

/* A new block of known key: the commonest case by far, and all of it in one place. */
static void store_new(kva_index *index, kva_column *column, kva_handles *table, uint32_t place, uint64_t key)
{
    table->entries[place].key = key;
    table->marks[place] = KVA_USED | KVA_KEYED | 1;
    column->counts.resident++;
    kva_claim(index, column, 0, key, 0);
}

void kva_column_prefetch(kva_column *column, const uint64_t *handles, size_t count)
{
    for (size_t i = 0; i < count && i < AHEAD; i++)
        prefetch_handle(column, handles[i]);
}

size_t kva_column_store(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles,
                        const uint64_t *keys, size_t count, uint32_t *woken)
{
    size_t waking = 0;
    index->ticks += count;
    column->counts.stored += count;
    for (size_t i = 0; i < count && i < AHEAD; i++)
        kva_flat_prefetch(index->planes[plane], keys[i]);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            prefetch_handle(column, handles[i + AHEAD]);
            kva_flat_prefetch(index->planes[plane], keys[i + AHEAD]);
        }
        kva_handles *table = table_of(column, handles[i]);
        uint32_t place = kva_handles_put(table, handles[i]);
        if (place == KVA_NOT_FOUND) {
            column->counts.refused++;
            continue;
        }
        if (plane == 0 && table->marks[place] == KVA_USED) {
            store_new(index, column, table, place, keys[i]);
            continue;
        }
        add_copy(index, column, plane, handles[i]);
        if (join_one(index, column, handles[i], keys[i]))
            woken[waking++] = (uint32_t)i;
    }
    return waking;
}

size_t kva_column_join(kva_index *index, kva_column *column, const uint64_t *handles, const uint64_t *keys, size_t count,
                       uint32_t *woken)
{
    size_t waking = 0;
    for (size_t i = 0; i < count && i < AHEAD; i++)
        kva_flat_prefetch(index->planes[0], keys[i]);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            kva_flat_prefetch(index->planes[0], keys[i + AHEAD]);
        if (join_one(index, column, handles[i], keys[i]))
            woken[waking++] = (uint32_t)i;
    }
    return waking;
}

void kva_column_remove(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles, size_t count)
{
    kva_column_prefetch(column, handles, count);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            prefetch_handle(column, handles[i + AHEAD]);
        kva_handles *table = table_of(column, handles[i]);
        uint32_t place = kva_handles_find(table, handles[i]);
        uint32_t copies = place == KVA_NOT_FOUND ? 0 : kva_copies_get(table, place, plane);
        if (!copies) {
            column->counts.unknown_removals++;
            kva_doubt_reported(index, column); /* it may have been one of those */
            continue;
        }
        column->counts.removed++;
        if (table->marks[place] & KVA_DOUBT)
            copies = 1; /* how many there were is in doubt as well: the last one may be gone */
        kva_copies_set(table, place, plane, copies - 1);
        if (copies > 1)
            continue;
        column->counts.resident--;
        if (plane == 0 && (table->marks[place] & (KVA_KEYED | KVA_DOUBT)) == KVA_KEYED)
            kva_note_removal(index, column, table->entries[place].key);
        if (table->marks[place] & KVA_KEYED)
            kva_unclaim(index, column, plane, table->entries[place].key, table->marks[place] & KVA_DOUBT);
        else
            kva_doubt_reported(index, column); /* as above */
        leave(column, table, place);
        kva_handles_shrink(table);
    }
}

int kva_column_key(const kva_column *column, uint64_t handle, uint64_t *key)
{
    const kva_handles *table = &column->tables[kva_table_of(handle)];
    uint32_t place = kva_handles_find(table, handle);
    if (place == KVA_NOT_FOUND || !(table->marks[place] & KVA_KEYED))
        return 0;
    *key = table->entries[place].key;
    return 1;
}

int kva_column_wait(kva_column *column, uint64_t handle)
{
    kva_handles *table = table_of(column, handle);
    uint32_t place = kva_handles_put(table, handle);
    if (place == KVA_NOT_FOUND)
        return 0;
    table->marks[place] |= KVA_WAITED;
    return 1;
}

void kva_column_stop_waiting(kva_column *column, uint64_t handle)
{
    kva_handles *table = table_of(column, handle);
    uint32_t place = kva_handles_find(table, handle);
    if (place == KVA_NOT_FOUND)
        return;
    table->marks[place] &= (uint8_t)~KVA_WAITED;
    drop_if_idle(table, place);
}

/* Take all copies of one plane from an entry. */
static void forget_in_plane(kva_index *index, kva_column *column, kva_handles *table, uint32_t place, uint32_t plane)
{
    if (!kva_copies_get(table, place, plane))
        return;
    kva_copies_set(table, place, plane, 0);
    column->counts.resident--;
    if (table->marks[place] & KVA_KEYED)
        kva_unclaim(index, column, plane, table->entries[place].key, table->marks[place] & KVA_DOUBT);
}

int kva_column_forget_entry(kva_index *index, kva_column *column, kva_handles *table, uint32_t place,
                            const uint8_t *planes)
{
    if (!kva_is_resident(table->marks[place]))
        return 0;
    if (!planes || planes[0])
        forget_in_plane(index, column, table, place, 0);
    for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
        if (!planes || planes[plane])
            forget_in_plane(index, column, table, place, plane);
    uint32_t before = table->count;
    leave(column, table, place);
    return table->count != before;
}

static void forget_in_table(kva_index *index, kva_column *column, kva_handles *table, const uint8_t *planes)
{
    for (uint32_t place = 0; place < table->capacity;) {
        if (place + AHEAD < table->capacity)
            kva_flat_prefetch(index->planes[0], table->entries[place + AHEAD].key);
        if (table->marks[place]) {
            uint32_t before = table->count;
            table->marks[place] &= (uint8_t)~KVA_WAITED;
            if (!kva_column_forget_entry(index, column, table, place, planes))
                drop_if_idle(table, place);
            if (table->count != before)
                continue; /* another entry may have moved here */
        }
        place++;
    }
    kva_handles_shrink(table);
}

void kva_column_forget(kva_index *index, kva_column *column, const uint8_t *planes)
{
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        forget_in_table(index, column, &column->tables[i], planes);
    if (planes[0])
        kva_drop_reported(index, column);
}

static void forget_table(kva_index *index, kva_column *column, kva_handles *table)
{
    for (uint32_t place = 0; place < table->capacity; place++) {
        if (place + AHEAD < table->capacity)
            kva_flat_prefetch(index->planes[0], table->entries[place + AHEAD].key);
        uint8_t mark = table->marks[place];
        if (!(mark & KVA_KEYED))
            continue;
        if (mark & KVA_COPIES)
            kva_unclaim(index, column, 0, table->entries[place].key, mark & KVA_DOUBT);
        if (!(mark & KVA_OTHERS))
            continue;
        for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
            if (kva_copies_get(table, place, plane))
                kva_unclaim(index, column, plane, table->entries[place].key, mark & KVA_DOUBT);
    }
    kva_handles_free(table);
}

void kva_column_forget_all(kva_index *index, kva_column *column)
{
    kva_uses_free(&column->uses, &index->budget);
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        forget_table(index, column, &column->tables[i]);
    kva_drop_reported(index, column);
    memset(column->removal_ages, 0, sizeof column->removal_ages);
    memset(column->use_ages, 0, sizeof column->use_ages);
    column->counts.resident = 0;
    column->counts.unkeyed = 0;
    column->counts.doubted = 0;
}
