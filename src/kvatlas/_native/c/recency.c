/* How long blocks were without use: when they are removed, and of those that stay.

   An age is in stamps of the whole fleet, since any worker's store or anybody's find last touched the block. A find of
   a prompt that then goes to another worker makes a block look younger than its engine has it. */
#include "index.h"

static uint32_t age_of(const kva_index *index, const kva_slot *slot)
{
    return kva_index_stamp(index) - slot->stamp; /* right across the wrap-around, too */
}

void kva_note_removal(kva_index *index, kva_column *column, uint64_t key)
{
    const kva_slot *slot = kva_flat_slot(index->planes[0], key);
    if (!slot)
        return;
    uint32_t age = age_of(index, slot);
    uint32_t bin = age ? 32 - (uint32_t)__builtin_clz(age) : 0;
    uint32_t *count = &column->removal_ages[bin < KVA_AGE_BINS ? bin : KVA_AGE_BINS - 1];
    *count += *count != UINT32_MAX;
}

static int age_at(kva_index *index, const kva_handles *table, uint32_t place, uint32_t *age)
{
    uint8_t mark = table->marks[place];
    if (!(mark & KVA_KEYED) || !(mark & KVA_COPIES) || mark & KVA_DOUBT)
        return 0;
    const kva_slot *slot = kva_flat_slot(index->planes[0], table->entries[place].key);
    if (!slot)
        return 0;
    *age = age_of(index, slot);
    return 1;
}

int kva_column_age(kva_index *index, const kva_column *column, uint64_t handle, uint32_t *age)
{
    const kva_handles *table = &column->tables[kva_table_of(handle)];
    uint32_t place = kva_handles_find(table, handle);
    return place != KVA_NOT_FOUND && age_at(index, table, place, age);
}

size_t kva_column_sample_ages(kva_index *index, const kva_column *column, uint32_t *ages, size_t room)
{
    size_t found = 0, places = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        places += column->tables[i].capacity;
    if (!room)
        return 0;
    size_t stride = (places + room - 1) / room, at = 0; /* one count of places over all tables */
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        const kva_handles *table = &column->tables[i];
        for (; at < table->capacity; at += stride)
            found += (size_t)age_at(index, table, (uint32_t)at, &ages[found]);
        at -= table->capacity;
    }
    return found;
}
