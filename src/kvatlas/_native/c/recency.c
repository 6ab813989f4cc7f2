/* How long blocks were without use: when they are removed, and of those that stay.

   An age is in stamps of the whole fleet, since any worker's store or anybody's find or use last touched the block. A
   find of a prompt that then goes to another worker makes a block look younger than its engine has it; see uses.h for
   ages that no other worker's business changes. */
#include "index.h"

enum { AHEAD = 12 };

static uint32_t age_of(const kva_index *index, const kva_slot *slot)
{
    return kva_index_stamp(index) - slot->stamp; /* right across the wrap-around, too */
}

static void count_one(uint32_t *count)
{
    *count += *count != UINT32_MAX;
}

const kva_slot *kva_stamped_slot(kva_index *index, const kva_handles *table, uint32_t place)
{
    uint8_t mark = table->marks[place];
    if (!(mark & KVA_KEYED) || !(mark & KVA_COPIES))
        return NULL;
    uint64_t key = table->entries[place].key;
    const kva_slot *slot = kva_flat_slot(index->planes[0], key);
    return slot || !(mark & KVA_DOUBT) || !index->shadows[0] ? slot : kva_flat_slot(index->shadows[0], key);
}

void kva_note_removal(kva_index *index, kva_column *column, uint64_t key)
{
    const kva_slot *slot = kva_flat_slot(index->planes[0], key);
    if (!slot)
        return;
    uint32_t age = age_of(index, slot);
    uint32_t bin = age ? 32 - (uint32_t)__builtin_clz(age) : 0;
    count_one(&column->removal_ages[bin < KVA_AGE_BINS ? bin : KVA_AGE_BINS - 1]);
    const uint32_t *time = kva_uses_find(&column->uses, kva_print(key));
    if (time)
        count_one(&column->use_ages[kva_age_code(kva_use_clock(column) - *time)]);
}

static size_t most_uses(const kva_column *column)
{
    size_t entries = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        entries += column->tables[i].count;
    return entries / KVA_BLOCKS_PER_USE > KVA_LEAST_USES ? entries / KVA_BLOCKS_PER_USE : KVA_LEAST_USES;
}

/* Later blocks of a prompt get earlier times: an engine frees a prompt's tail first. */
size_t kva_column_touch(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, size_t fresh)
{
    uint32_t stamp = kva_index_stamp(index), now = kva_use_clock(column), set = KVA_EMPTY_SET;
    size_t held = 0, first = count, last = 0;
    int holds = 0;
    for (size_t i = 0; i < count && i < AHEAD; i++)
        kva_flat_prefetch(index->planes[0], keys[i]);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            kva_flat_prefetch(index->planes[0], keys[i + AHEAD]);
        kva_slot *slot = kva_flat_slot(index->planes[0], keys[i]);
        if (!slot)
            continue;
        if (slot->set != set) {
            set = slot->set;
            holds = kva_set_has(&index->sets, set, column->worker);
        }
        if (!holds)
            continue;
        slot->stamp = stamp;
        uint32_t *time = kva_uses_find(&column->uses, kva_print(keys[i]));
        if (time)
            *time = now + (uint32_t)(count - i);
        if (first == count && i >= fresh)
            first = i;
        last = i;
        held++;
    }
    index->ticks += held;
    if (!held)
        return 0;
    column->used += count;
    size_t most = most_uses(column), marked[2] = {first, last};
    for (size_t i = first == count; i < 2; i++)
        kva_uses_put(&column->uses, &index->budget, kva_print(keys[marked[i]]), now + (uint32_t)(count - marked[i]),
                     kva_use_clock(column), most);
    return held;
}

int kva_column_use_age(const kva_column *column, uint64_t key, uint32_t *age)
{
    const uint32_t *time = kva_uses_find(&column->uses, kva_print(key));
    if (time)
        *age = kva_use_clock(column) - *time;
    return time != NULL;
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
