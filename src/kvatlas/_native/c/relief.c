/* Giving knowledge up to make room: what matches nothing first, then what was longest without use. */
#include "index.h"

#include <stdlib.h>

enum { SAMPLE_OF_TABLE = 256 };

/* How lately an entry was of use, the larger the later; 0 for one that no prompt can match. Stamps go around, ages in
   stamps do not while they are below 2^32. */
static uint32_t recency_of(kva_index *index, const kva_handles *table, uint32_t place)
{
    const kva_slot *slot = kva_stamped_slot(index, table, place);
    return slot ? UINT32_MAX - (kva_index_stamp(index) - slot->stamp) : 0;
}

static int by_value(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* The recency up to which about `share` of the entries lie, from a sample. */
static uint32_t recency_below(kva_index *index, const kva_column *column, double share)
{
    uint32_t sample[KVA_TABLES * SAMPLE_OF_TABLE], found = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        const kva_handles *table = &column->tables[i];
        uint32_t stride = table->capacity / SAMPLE_OF_TABLE + 1;
        for (uint32_t place = 0; place < table->capacity; place += stride)
            if (kva_is_resident(table->marks[place]))
                sample[found++] = recency_of(index, table, place);
    }
    if (!found)
        return UINT32_MAX;
    qsort(sample, found, sizeof *sample, by_value);
    return sample[(uint32_t)((double)(found - 1) * share)];
}

/* Forget up to `count` entries of one table whose recency is below `limit`. */
static size_t forget_below(kva_index *index, kva_column *column, kva_handles *table, uint64_t limit, size_t count)
{
    size_t gone = 0;
    for (uint32_t place = 0; place < table->capacity && gone < count;) {
        if (!kva_is_resident(table->marks[place]) || recency_of(index, table, place) >= limit) {
            place++;
            continue;
        }
        gone++;
        if (!kva_column_forget_entry(index, column, table, place, NULL))
            place++; /* else another entry may have moved here */
    }
    return gone;
}

size_t kva_column_forget_oldest(kva_index *index, kva_column *column, size_t count)
{
    size_t entries = 0, gone = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        entries += column->tables[i].count;
    if (!entries || !count)
        return 0;
    int all = count >= entries;
    if (all)
        count = entries;
    uint64_t limit = all ? UINT32_MAX : recency_below(index, column, (double)count / (double)entries);
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        gone += forget_below(index, column, &column->tables[i], limit, count - gone);
    size_t first = gone; /* of those of the very age every table gives its part */
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        size_t quota = first + (count - first) * (i + 1) / KVA_TABLES;
        gone += forget_below(index, column, &column->tables[i], limit + 1, quota - gone);
    }
    for (uint32_t i = 0; i < KVA_TABLES; i++) { /* and what tables with few entries could not give, others do */
        gone += forget_below(index, column, &column->tables[i], limit + 1, count - gone);
        kva_handles_shrink(&column->tables[i]);
    }
    column->counts.forgotten += gone;
    return gone;
}
