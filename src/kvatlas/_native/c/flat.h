/* One plane of the index: block key -> set of workers, and when the block was last of use.

   Open addressing over 16-byte slots in linear order, cut into 256 segments by the key's top byte: a segment grows by
   itself, so no insert waits for more than 1/256 of the plane to move. Segments start at different sizes so that they
   do not grow together. Keys are hashes under a secret seed, so their bits are used as they are. */
#ifndef KVA_FLAT_H
#define KVA_FLAT_H

#include "mix.h"
#include "worker_sets.h"

enum { KVA_SEGMENTS = 256 };

typedef struct {
    uint64_t key;
    uint32_t set;   /* KVA_EMPTY_SET: an empty slot */
    uint32_t stamp; /* the index's tick when the block was stored or asked for */
} kva_slot;

typedef struct {
    kva_slot *slots;
    uint32_t capacity, count;
} kva_segment;

typedef struct {
    kva_segment segments[KVA_SEGMENTS];
    kva_sets *sets;
    size_t count;
} kva_flat;

static inline kva_segment *kva_segment_of(kva_flat *flat, uint64_t key)
{
    return &flat->segments[key >> 56];
}

static inline uint32_t kva_home(const kva_segment *segment, uint64_t key)
{
    return kva_place((uint32_t)(key >> 24), segment->capacity);
}

/* Ask for the memory of a key's slot before it is needed. */
static inline void kva_flat_prefetch(kva_flat *flat, uint64_t key)
{
    kva_segment *segment = kva_segment_of(flat, key);
    if (segment->slots)
        __builtin_prefetch(&segment->slots[kva_home(segment, key)]);
}

/* The slot of a key, or NULL. */
static inline kva_slot *kva_flat_slot(kva_flat *flat, uint64_t key)
{
    kva_segment *segment = kva_segment_of(flat, key);
    if (!segment->slots)
        return NULL;
    for (uint32_t at = kva_home(segment, key);; at = at + 1 == segment->capacity ? 0 : at + 1) {
        kva_slot *slot = &segment->slots[at];
        if (slot->set == KVA_EMPTY_SET)
            return NULL;
        if (slot->key == key)
            return slot;
    }
}

/* A worker holds a block; repeating it renews the stamp, and an earlier one changes none. 0 when there is no memory: then nothing changed. */
int kva_flat_add(kva_flat *flat, uint64_t key, uint32_t worker, uint32_t stamp);

/* A worker no longer holds a block; it need not have. 0 when there is no memory for the smaller set: then nothing
   changed. */
int kva_flat_discard(kva_flat *flat, uint64_t key, uint32_t worker);

/* Nobody holds the block of a slot any more. Slots may move. */
void kva_flat_drop(kva_flat *flat, kva_slot *slot);

void kva_flat_free(kva_flat *flat);

#endif
