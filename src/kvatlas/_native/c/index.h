/* The fleet index: workers' books over planes of residency, in one budget of memory.

   A plane is one KV cache group in one medium; plane 0 is the first group of the device. A worker is a small number, its
   bit in every set. What is refused for want of memory is counted and leaves the index claiming less, never more.

   What a worker held when its events were lost is in doubt: such claims stand in the shadow of their plane, where only
   those find them who ask for doubted claims, too. */
#ifndef KVA_INDEX_H
#define KVA_INDEX_H

#include "chain.h"
#include "column.h"
#include "flat.h"
#include "uses.h"
#include "xxh3.h"

typedef struct {
    uint64_t stored, removed, unknown_removals; /* blocks */
    uint64_t unpaired;                           /* blocks whose tokens their event does not prove */
    uint64_t refused;                            /* blocks not recorded, or not claimed, for want of memory */
    uint64_t forgotten;                          /* blocks given up to make room */
    int64_t resident, unkeyed;                   /* levels: (block, plane) pairs; blocks of unknown key */
    int64_t doubted;                             /* level: blocks in doubt */
} kva_counts;

enum { KVA_MAX_NAME = 47, KVA_MAX_PROFILES = 16, KVA_AGE_BINS = 32 };

typedef struct {
    uint8_t given, length;
    char text[KVA_MAX_NAME];
} kva_name;

/* Events that apply without asking (see apply.h): where they say they are, and the plane that is. */
typedef struct {
    kva_name medium, kind;
    int has_group, has_window;
    uint64_t group, window, block_size;
    uint32_t plane;
} kva_profile;

typedef struct {
    uint32_t worker;
    uint32_t profile_count;
    kva_profile profiles[KVA_MAX_PROFILES];
    int counting; /* whether a repeated store is one more copy */
    uint64_t root_key;
    kva_handles tables[KVA_TABLES];
    kva_handles reported; /* block keys that the engine reported and no event named -> `stored` at that time */
    uint32_t unsure;      /* whether all of `reported` is in doubt */
    kva_counts counts;
    uint32_t removal_ages[KVA_AGE_BINS]; /* removals by age in stamps: bin 0 for 0, bin i for 2^(i-1) to 2^i - 1 */
    kva_uses uses;                       /* see uses.h; of blocks claimed in plane 0 beyond doubt */
    uint64_t used;                       /* blocks that requests used: with `counts.stored`, the clock of `uses` */
    uint32_t use_ages[KVA_USE_BINS];     /* removals of blocks in `uses` by the code of their age on that clock */
} kva_column;

typedef struct {
    kva_budget budget;
    kva_sets sets;
    kva_flat *planes[KVA_MAX_PLANES];
    kva_flat *shadows[KVA_MAX_PLANES]; /* NULL: nothing was ever in doubt there */
    kva_column *columns[KVA_MAX_WORKERS];
    uint32_t plane_count, worker_words; /* words of a row with a bit for every worker that ever was */
    uint64_t ticks;                     /* grows with stores, finds and uses; a stamp is some of its upper bits */
    kva_xxh3_key key;
} kva_index;

enum { KVA_TICKS_PER_STAMP = 64 };

/* NULL when there is no memory. `max_bytes` 0: no cap. */
kva_index *kva_index_new(uint64_t seed, size_t max_bytes);
void kva_index_free(kva_index *index);

/* The number of a new plane; KVA_MAX_PLANES when there is no room or memory. */
uint32_t kva_index_add_plane(kva_index *index);

/* A new column with the lowest free number; NULL when all are taken or there is no memory. */
kva_column *kva_index_add_worker(kva_index *index, uint64_t root_key, int counting);
void kva_index_drop_worker(kva_index *index, kva_column *column);

/* One more copy of each block; their keys stay as they are. */
void kva_column_add_copies(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles, size_t count);

/* Give blocks their keys, where they have none. Writes the positions of those somebody waited for, who then no longer
   waits, and returns their number. */
size_t kva_column_join(kva_index *index, kva_column *column, const uint64_t *handles, const uint64_t *keys, size_t count,
                       uint32_t *woken);

/* Ask for the memory of the first of these handles before they are needed. */
void kva_column_prefetch(kva_column *column, const uint64_t *handles, size_t count);

/* Both at once: a store whose blocks' keys are known. */
size_t kva_column_store(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles,
                        const uint64_t *keys, size_t count, uint32_t *woken);

/* One copy less of each block. */
void kva_column_remove(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles, size_t count);

/* 1 and the block key of a resident block; 0 when it is not resident or has no key. */
int kva_column_key(const kva_column *column, uint64_t handle, uint64_t *key);

/* Remember that somebody waits for a handle's key, or no longer does. 0 when there is no memory. */
int kva_column_wait(kva_column *column, uint64_t handle);
void kva_column_stop_waiting(kva_column *column, uint64_t handle);

/* Forget all copies in the planes whose byte is not 0, and who waits. O(blocks of the worker). */
void kva_column_forget(kva_index *index, kva_column *column, const uint8_t *planes);
void kva_column_forget_all(kva_index *index, kva_column *column);

/* The same for one entry. Returns 1 when the entry went: its place may then hold another one. */
int kva_column_forget_entry(kva_index *index, kva_column *column, kva_handles *table, uint32_t place,
                            const uint8_t *planes);

/* Forget about `count` blocks, those without a key first, then those longest without use. Returns how many went. */
size_t kva_column_forget_oldest(kva_index *index, kva_column *column, size_t count);

/* 1 and the age, in stamps, of a block claimed without doubt in plane 0; 0 when there is no such claim. */
int kva_column_age(kva_index *index, const kva_column *column, uint64_t handle, uint32_t *age);

/* The ages of some such blocks, spread evenly over the books. Writes at most `room`, returns how many. O(room) when the
   books are well filled. */
size_t kva_column_sample_ages(kva_index *index, const kva_column *column, uint32_t *ages, size_t room);

/* A request used these blocks, its prompt's, on a worker: those that the worker surely holds in plane 0 are of use now,
   for the fleet and by the worker's own clock. `fresh`: the first that the request computed. Returns how many. */
size_t kva_column_touch(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, size_t fresh);

/* 1 and how long a block went without use by the worker's own clock; 0 when it has no time. */
int kva_column_use_age(const kva_column *column, uint64_t key, uint32_t *age);

/* Put all a worker holds in doubt. O(blocks of the worker). */
void kva_column_doubt(kva_index *index, kva_column *column);

/* Forget what is in doubt still; what was confirmed meanwhile stays. Returns how many blocks went. O(its blocks). */
size_t kva_column_settle(kva_index *index, kva_column *column);

/* The worker's engine says that it holds these blocks in plane 0: ends doubts; a block that no event named is claimed,
   in doubt unless `certain`. Writes how many doubts ended and how many claims are new. */
void kva_column_confirm(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, int certain,
                        size_t *ended, size_t *adopted);

/* The engine does not hold these blocks: claims in doubt go. Returns how many. */
size_t kva_column_refute(kva_index *index, kva_column *column, const uint64_t *keys, size_t count);

/* Forget reported claims from when `stored` was below a bound. Returns how many. */
size_t kva_column_expire_reported(kva_index *index, kva_column *column, uint64_t stored);

/* 2: a worker holds a block in a plane; 1: that is in doubt; 0: it does not, as far as is known. */
int kva_column_holds(kva_index *index, uint32_t worker, uint32_t plane, uint64_t key);

/* A plane's shadow, made when it is first needed; NULL when there is no memory. */
kva_flat *kva_index_shadow(kva_index *index, uint32_t plane);

/* Used by books.c, doubt.c, dump.c, recency.c and relief.c. `kva_stamped_slot`: the slot with an entry's stamp, in the
   shadow where a block in doubt has none in plane 0; NULL when no prompt can match it. */
const kva_slot *kva_stamped_slot(kva_index *index, const kva_handles *table, uint32_t place);
void kva_claim(kva_index *index, kva_column *column, uint32_t plane, uint64_t key, int in_doubt);
void kva_take_claim(kva_index *index, kva_column *column, kva_flat *flat, uint64_t key);
void kva_unclaim(kva_index *index, kva_column *column, uint32_t plane, uint64_t key, int in_doubt);
void kva_note_removal(kva_index *index, kva_column *column, uint64_t key);
void kva_drop_reported(kva_index *index, kva_column *column);
void kva_doubt_reported(kva_index *index, kva_column *column);

/* A walk along a chain: which workers still hold every block. */
typedef struct {
    uint32_t worker, blocks;
} kva_hit;

typedef struct {
    kva_index *index;
    kva_flat *plane, *shadow; /* shadow NULL: doubted claims do not count */
    kva_hit *hits;            /* room for every worker asked about */
    size_t hit_count;
    uint32_t blocks, set, shadow_set, words;
    uint64_t alive[KVA_WORKER_WORDS];
} kva_walk;

/* `asked`: a bit for each worker asked about, `words` words. `doubted`: whether doubted claims count, too. */
void kva_walk_begin(kva_walk *walk, kva_index *index, uint32_t plane, const uint64_t *asked, size_t words, int doubted,
                    kva_hit *hits);

/* The next blocks of the chain. 0 when nobody holds them all any more: later blocks change nothing. */
int kva_walk_on(kva_walk *walk, const uint64_t *keys, size_t count);

/* The same for token ids: hashed a few blocks ahead, no further than somebody holds them, and at most `limit` blocks. */
kva_status kva_walk_tokens(kva_walk *walk, const kva_tokens *tokens, size_t block_size, uint64_t parent, size_t limit);

/* Write down those who hold the whole chain. `hits` is then complete: workers that hold at least the first block. */
void kva_walk_end(kva_walk *walk);

/* A worker's column as bytes (dump.c tells how), and back: all of it, or nothing. */
typedef enum {
    KVA_DUMP_OK,
    KVA_DUMP_MEMORY,
    KVA_DUMP_NOT_EMPTY, /* the column that was to take it holds blocks */
    KVA_DUMP_LENGTH,    /* bytes are missing, or too many */
    KVA_DUMP_ROOT_KEY,  /* its block keys are of another seed or namespace */
    KVA_DUMP_COUNTING,  /* it counts copies and the column does not, or the other way round */
    KVA_DUMP_PLANE,     /* it names a plane there is none of */
    KVA_DUMP_ENTRY,     /* an entry contradicts itself */
    KVA_DUMP_TWICE      /* a handle comes twice */
} kva_dump_fault;

size_t kva_dump_size(const kva_column *column);

/* `out` has room for kva_dump_size bytes. */
void kva_dump(kva_index *index, const kva_column *column, uint8_t *out);

/* Into an empty column. `planes`: the number here of each of the dump's `plane_count` planes; 0 for the first and for no
   other. */
kva_dump_fault kva_load(kva_index *index, kva_column *column, const uint8_t *data, size_t length,
                        const uint32_t *planes, uint32_t plane_count);

static inline uint32_t kva_use_clock(const kva_column *column)
{
    return (uint32_t)(column->counts.stored + column->used);
}

static inline uint32_t kva_index_stamp(const kva_index *index)
{
    return (uint32_t)(index->ticks / KVA_TICKS_PER_STAMP);
}

#endif
