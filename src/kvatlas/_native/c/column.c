#include "column.h"

#include "bytes.h"

#include <string.h>

/* Full at 4/5. Grown twofold while small, then by 2/5, then by a fifth: memory counts here, there is one entry for every
   block on every worker, but the last few places cost long searches, and each step moves all entries. Shrunk to 2/3 full
   when so few are left that the next step up is far. */
enum { FIRST_ENTRIES = 32, SMALL_ENTRIES = 256, LARGE_ENTRIES = 2048, FULL_NUMERATOR = 4, FULL_DENOMINATOR = 5, FIRST_OTHERS = 16 };

enum { AT_ONCE = 8 };
#define ALL_USED (KVA_USED * 0x0101010101010101u) /* eight marks of used places, as far as this bit */

/* Whether an entry found at `at`, whose home is `home`, may move back to `hole`. */
static int may_move(uint32_t at, uint32_t home, uint32_t hole, uint32_t capacity)
{
    uint32_t from_home = at >= home ? at - home : at + capacity - home;
    uint32_t from_hole = at >= hole ? at - hole : at + capacity - hole;
    return from_home >= from_hole;
}

static uint32_t free_place(const kva_handles *table, uint64_t handle)
{
    uint32_t at = kva_handle_home(handle, table->capacity);
    while (table->marks[at])
        at = kva_after(at, table->capacity);
    return at;
}

/* The place of a handle, or the free place where it would go.

   Eight places are looked at together, without a branch for each: where a row of used places ends cannot be foretold,
   and a wrong guess of the processor's costs more than all eight. */
static uint32_t its_place(const kva_handles *table, uint64_t handle)
{
    uint32_t at = kva_handle_home(handle, table->capacity);
    if (at + AT_ONCE <= table->capacity) {
        const kva_entry *entries = table->entries + at;
        uint64_t free_marks = ~kva_load64le(table->marks + at) & ALL_USED;
        unsigned same = 0, row = free_marks ? (unsigned)__builtin_ctzll(free_marks) / 8 : AT_ONCE;
        for (unsigned i = 0; i < AT_ONCE; i++)
            same |= (unsigned)(entries[i].handle == handle) << i;
        same &= (1u << row) - 1;
        if (same)
            return at + (uint32_t)__builtin_ctz(same);
        if (row < AT_ONCE)
            return at + row;
        at = kva_after(at + AT_ONCE - 1, table->capacity);
    }
    while (table->marks[at] && table->entries[at].handle != handle)
        at = kva_after(at, table->capacity);
    return at;
}

static int resize(kva_handles *table, uint32_t capacity)
{
    kva_entry *memory = kva_take(table->budget, (size_t)kva_handle_bytes(capacity));
    if (!memory)
        return 0;
    kva_handles resized = *table;
    resized.entries = memory;
    resized.marks = (uint8_t *)(memory + capacity);
    resized.capacity = capacity;
    for (uint32_t i = 0; i < table->capacity; i++) {
        if (!table->marks[i])
            continue;
        uint32_t at = free_place(&resized, table->entries[i].handle);
        resized.entries[at] = table->entries[i];
        resized.marks[at] = table->marks[i];
    }
    kva_give_back(table->budget, table->entries);
    *table = resized;
    return 1;
}

static int is_full(const kva_handles *table)
{
    return table->count >= (uint32_t)((uint64_t)table->capacity * FULL_NUMERATOR / FULL_DENOMINATOR);
}

/* First sizes are spread over one step of growth, so that a column's tables do not grow together. */
static int grow(kva_handles *table, uint64_t handle)
{
    if (!table->capacity)
        return resize(table, FIRST_ENTRIES + kva_table_of(handle) * 10 / KVA_TABLES);
    uint32_t capacity = table->capacity, fifth = capacity / 5;
    uint32_t more = capacity < SMALL_ENTRIES ? capacity : capacity < LARGE_ENTRIES ? 2 * fifth : fifth;
    return table->capacity <= UINT32_MAX / 2 && resize(table, table->capacity + more);
}

uint32_t kva_handles_put(kva_handles *table, uint64_t handle)
{
    uint32_t at = KVA_NOT_FOUND;
    if (table->capacity) {
        at = its_place(table, handle);
        if (table->marks[at])
            return at;
    }
    if (is_full(table)) { /* an empty table, too */
        if (!grow(table, handle))
            return KVA_NOT_FOUND;
        at = free_place(table, handle);
    }
    table->entries[at] = (kva_entry){handle, 0};
    table->marks[at] = KVA_USED;
    table->count++;
    return at;
}

void kva_handles_erase(kva_handles *table, uint32_t hole)
{
    uint32_t capacity = table->capacity;
    for (uint32_t at = kva_after(hole, capacity); table->marks[at]; at = kva_after(at, capacity)) {
        if (!may_move(at, kva_handle_home(table->entries[at].handle, capacity), hole, capacity))
            continue;
        table->entries[hole] = table->entries[at];
        table->marks[hole] = table->marks[at];
        hole = at;
    }
    table->marks[hole] = 0;
    table->count--;
}

int kva_handles_reserve(kva_handles *table, uint32_t count)
{
    if (count > UINT32_MAX / 2)
        return 0;
    uint32_t capacity = count + count / 4 + FIRST_ENTRIES;
    return table->capacity >= capacity || resize(table, capacity);
}

void kva_handles_shrink(kva_handles *table)
{
    uint64_t count = table->count, capacity = table->capacity;
    uint64_t shrunk = count + count / 2 + FIRST_ENTRIES;
    int is_sparse = capacity <= 2 * SMALL_ENTRIES ? 4 * count < capacity : 9 * count < 4 * capacity;
    if (is_sparse && shrunk < capacity)
        resize(table, (uint32_t)shrunk); /* without memory it stays as it is */
}

/* The second table */

static uint32_t home_of_copies(uint64_t handle, uint32_t plane, uint32_t capacity)
{
    return kva_handle_home(handle + (uint64_t)plane * 0x9E3779B97F4A7C15u, capacity);
}

static uint32_t find_copies(const kva_handles *table, uint64_t handle, uint32_t plane)
{
    if (!table->other_count)
        return KVA_NOT_FOUND;
    uint32_t capacity = table->other_capacity;
    for (uint32_t at = home_of_copies(handle, plane, capacity);; at = kva_after(at, capacity)) {
        const kva_copies *entry = &table->others[at];
        if (!entry->copies)
            return KVA_NOT_FOUND;
        if (entry->handle == handle && entry->plane == plane)
            return at;
    }
}

static void put_copies(kva_handles *table, kva_copies entry)
{
    uint32_t at = home_of_copies(entry.handle, entry.plane, table->other_capacity);
    while (table->others[at].copies)
        at = kva_after(at, table->other_capacity);
    table->others[at] = entry;
}

static int resize_others(kva_handles *table, uint32_t capacity)
{
    kva_copies *memory = kva_take(table->budget, sizeof(kva_copies) * capacity);
    if (!memory)
        return 0;
    kva_copies *before = table->others;
    uint32_t before_capacity = table->other_capacity;
    table->others = memory;
    table->other_capacity = capacity;
    for (uint32_t i = 0; i < before_capacity; i++)
        if (before[i].copies)
            put_copies(table, before[i]);
    kva_give_back(table->budget, before);
    return 1;
}

static void erase_copies(kva_handles *table, uint32_t hole)
{
    uint32_t capacity = table->other_capacity;
    for (uint32_t at = kva_after(hole, capacity); table->others[at].copies; at = kva_after(at, capacity)) {
        const kva_copies *entry = &table->others[at];
        if (!may_move(at, home_of_copies(entry->handle, entry->plane, capacity), hole, capacity))
            continue;
        table->others[hole] = *entry;
        hole = at;
    }
    table->others[hole].copies = 0;
    table->other_count--;
    if (table->other_count < capacity / 8 && capacity > 2 * FIRST_OTHERS)
        resize_others(table, capacity / 2);
}

static int set_copies(kva_handles *table, uint64_t handle, uint32_t plane, uint32_t copies)
{
    uint32_t at = find_copies(table, handle, plane);
    if (at != KVA_NOT_FOUND) {
        if (copies)
            table->others[at].copies = copies;
        else
            erase_copies(table, at);
        return 1;
    }
    if (!copies)
        return 1;
    if (table->other_count >= table->other_capacity / 4 * 3) {
        uint32_t capacity = table->other_capacity;
        if (!resize_others(table, capacity ? capacity + capacity / 2 : FIRST_OTHERS))
            return 0;
    }
    put_copies(table, (kva_copies){handle, plane, copies});
    table->other_count++;
    return 1;
}

uint32_t kva_copies_get(const kva_handles *table, uint32_t place, uint32_t plane)
{
    uint8_t mark = table->marks[place];
    if (plane == 0 && (mark & KVA_COPIES) != KVA_MANY)
        return mark & KVA_COPIES;
    if (plane != 0 && !(mark & KVA_OTHERS))
        return 0;
    uint32_t at = find_copies(table, table->entries[place].handle, plane);
    return at == KVA_NOT_FOUND ? 0 : table->others[at].copies;
}

uint32_t kva_next_plane(const kva_handles *table, uint32_t plane)
{
    for (uint32_t word = plane / 64; word < KVA_MAX_PLANES / 64; word++) {
        uint64_t bits = table->planes[word];
        if (word == plane / 64)
            bits &= ~(uint64_t)0 << (plane % 64);
        if (bits)
            return word * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return KVA_MAX_PLANES;
}

static int has_others(const kva_handles *table, uint64_t handle)
{
    for (uint32_t plane = kva_next_plane(table, 1); plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1))
        if (find_copies(table, handle, plane) != KVA_NOT_FOUND)
            return 1;
    return 0;
}

int kva_copies_set(kva_handles *table, uint32_t place, uint32_t plane, uint32_t copies)
{
    uint8_t *mark = &table->marks[place];
    uint64_t handle = table->entries[place].handle;
    if (plane == 0) {
        uint32_t small = copies < KVA_MANY ? copies : KVA_MANY;
        int was_many = (*mark & KVA_COPIES) == KVA_MANY;
        if (small == KVA_MANY ? !set_copies(table, handle, 0, copies) : was_many && !set_copies(table, handle, 0, 0))
            return 0;
        *mark = (uint8_t)(((uint32_t)*mark & ~(uint32_t)KVA_COPIES) | small);
        return 1;
    }
    if (!set_copies(table, handle, plane, copies))
        return 0;
    if (copies) {
        table->planes[plane / 64] |= (uint64_t)1 << (plane % 64);
        *mark |= KVA_OTHERS;
    } else if (!has_others(table, handle))
        *mark &= (uint8_t)~KVA_OTHERS;
    return 1;
}

void kva_handles_free(kva_handles *table)
{
    kva_budget *budget = table->budget;
    kva_give_back(budget, table->entries);
    kva_give_back(budget, table->others);
    memset(table, 0, sizeof *table);
    table->budget = budget;
}
