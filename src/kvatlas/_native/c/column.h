/* One worker's books: what its engine's hashes (handles) mean, and how many copies of each block it holds where.

   Handles are 64-bit words: an engine's own integers, or a seeded hash of its bytes. A table maps each to a block key
   and a byte that counts copies in the first plane; copies elsewhere, and counts that do not fit, are in a second,
   usually empty table. 17 bytes an entry. A column has four such tables, chosen by the handle, so that growing moves a
   quarter of it at a time. */
#ifndef KVA_COLUMN_H
#define KVA_COLUMN_H

#include "memory.h"
#include "mix.h"

#include <stdint.h>

enum { KVA_MAX_PLANES = 256 };

/* Bits of an entry's byte. A used entry is never 0. */
enum {
    KVA_USED = 0x80,
    KVA_KEYED = 0x40,  /* its block key is known */
    KVA_WAITED = 0x20, /* runs of unknown parent wait for its key */
    KVA_OTHERS = 0x10, /* the second table has copies of it */
    KVA_DOUBT = 0x08,  /* whether the worker still holds it is in doubt */
    KVA_COPIES = 0x07, /* copies in the first plane; KVA_MANY: counted in the second table */
    KVA_MANY = 0x07
};

typedef struct {
    uint64_t handle, key;
} kva_entry;

typedef struct {
    uint64_t handle;
    uint32_t plane, copies; /* copies 0: an empty place */
} kva_copies;

typedef struct {
    kva_budget *budget;
    kva_entry *entries; /* one piece of memory: entries, then marks */
    uint8_t *marks;
    uint32_t capacity, count;
    kva_copies *others;
    uint32_t other_capacity, other_count;
    uint64_t planes[KVA_MAX_PLANES / 64]; /* bits of the planes, without the first, that it ever counted copies in */
} kva_handles;

#define KVA_NOT_FOUND UINT32_MAX

static inline uint64_t kva_handle_bytes(uint32_t capacity)
{
    return (uint64_t)capacity * 17;
}

enum { KVA_TABLES = 4 };

/* Which of a column's tables a handle belongs to. */
static inline uint32_t kva_table_of(uint64_t handle)
{
    return (uint32_t)(kva_mix(handle) >> 62);
}

static inline uint32_t kva_handle_home(uint64_t handle, uint32_t capacity)
{
    return kva_place((uint32_t)(kva_mix(handle) >> 30), capacity);
}

static inline uint32_t kva_after(uint32_t place, uint32_t capacity)
{
    return place + 1 == capacity ? 0 : place + 1;
}

/* Place of a handle, or KVA_NOT_FOUND. Places move with the next put or erase. */
static inline uint32_t kva_handles_find(const kva_handles *table, uint64_t handle)
{
    if (!table->count)
        return KVA_NOT_FOUND;
    for (uint32_t at = kva_handle_home(handle, table->capacity);; at = kva_after(at, table->capacity)) {
        if (!table->marks[at])
            return KVA_NOT_FOUND;
        if (table->entries[at].handle == handle)
            return at;
    }
}

static inline void kva_handles_prefetch(const kva_handles *table, uint64_t handle)
{
    if (!table->capacity)
        return;
    uint32_t at = kva_handle_home(handle, table->capacity);
    __builtin_prefetch(&table->entries[at]);
    __builtin_prefetch(&table->marks[at]);
}

/* Place of a handle, new ones without key or copies; KVA_NOT_FOUND when there is no memory. */
uint32_t kva_handles_put(kva_handles *table, uint64_t handle);

/* Make room for `count` entries in all, at once. 0 when there is no memory. */
int kva_handles_reserve(kva_handles *table, uint32_t count);

/* Forget the entry at a place. The place may then hold another entry. */
void kva_handles_erase(kva_handles *table, uint32_t place);

/* Give memory back after many entries went. */
void kva_handles_shrink(kva_handles *table);

/* Copies of a handle in a plane. */
uint32_t kva_copies_get(const kva_handles *table, uint32_t place, uint32_t plane);

/* Set them; keeps KVA_OTHERS true. 0 when there is no memory: then nothing changed. */
int kva_copies_set(kva_handles *table, uint32_t place, uint32_t plane, uint32_t copies);

/* The next plane from `plane` on, without the first, that this worker ever counted copies in; KVA_MAX_PLANES: none. */
uint32_t kva_next_plane(const kva_handles *table, uint32_t plane);

/* Whether no plane has copies and nobody waits: the entry says nothing more. */
static inline int kva_is_idle(uint8_t mark)
{
    return !(mark & (KVA_WAITED | KVA_OTHERS | KVA_COPIES));
}

static inline int kva_is_resident(uint8_t mark)
{
    return (mark & (KVA_OTHERS | KVA_COPIES)) != 0;
}

void kva_handles_free(kva_handles *table);

#endif
