#include "flat.h"

#include <string.h>

/* Full at 13/16, doubled while small and then grown by half; shrunk below 1/4 to twice the need. */
enum { FIRST_SLOTS = 16, SMALL_SLOTS = 512, FULL_NUMERATOR = 13, FULL_DENOMINATOR = 16 };

static uint32_t limit_of(uint32_t capacity)
{
    return (uint32_t)((uint64_t)capacity * FULL_NUMERATOR / FULL_DENOMINATOR);
}

/* Segments' first sizes are spread over one step of growth. */
static uint32_t first_capacity(const kva_flat *flat, const kva_segment *segment)
{
    return FIRST_SLOTS + (uint32_t)(segment - flat->segments) % (FIRST_SLOTS * 2 / 5);
}

static void put(kva_segment *segment, kva_slot slot)
{
    uint32_t at = kva_home(segment, slot.key);
    while (segment->slots[at].set != KVA_EMPTY_SET)
        at = at + 1 == segment->capacity ? 0 : at + 1;
    segment->slots[at] = slot;
}

static int resize(kva_flat *flat, kva_segment *segment, uint32_t capacity)
{
    kva_segment resized = {kva_take(flat->sets->budget, sizeof(kva_slot) * capacity), capacity, segment->count};
    if (!resized.slots)
        return 0;
    for (uint32_t i = 0; i < segment->capacity; i++)
        if (segment->slots[i].set != KVA_EMPTY_SET)
            put(&resized, segment->slots[i]);
    kva_give_back(flat->sets->budget, segment->slots);
    *segment = resized;
    return 1;
}

static int grow(kva_flat *flat, kva_segment *segment)
{
    if (!segment->slots)
        return resize(flat, segment, first_capacity(flat, segment));
    uint32_t more = segment->capacity < SMALL_SLOTS ? segment->capacity : segment->capacity / 2;
    return segment->capacity <= UINT32_MAX / 2 && resize(flat, segment, segment->capacity + more);
}

/* The slot of a key, or the empty one where it would go. */
static kva_slot *its_slot(const kva_segment *segment, uint64_t key)
{
    uint32_t at = kva_home(segment, key);
    while (segment->slots[at].set != KVA_EMPTY_SET && segment->slots[at].key != key)
        at = at + 1 == segment->capacity ? 0 : at + 1;
    return &segment->slots[at];
}

static void name_set(kva_flat *flat, kva_slot *slot, uint32_t set)
{
    uint32_t before = slot->set;
    kva_set_hold(flat->sets, set);
    slot->set = set;
    kva_set_release(flat->sets, before);
}

int kva_flat_add(kva_flat *flat, uint64_t key, uint32_t worker, uint32_t stamp)
{
    kva_segment *segment = kva_segment_of(flat, key);
    kva_slot *slot = segment->slots ? its_slot(segment, key) : NULL;
    if (slot && slot->set != KVA_EMPTY_SET) {
        uint32_t set = kva_set_with(flat->sets, slot->set, worker);
        if (set == KVA_NO_SET)
            return 0;
        if (set != slot->set)
            name_set(flat, slot, set);
        if ((int32_t)(stamp - slot->stamp) > 0)
            slot->stamp = stamp;
        return 1;
    }
    if (segment->count >= limit_of(segment->capacity)) {
        if (!grow(flat, segment))
            return 0;
        slot = its_slot(segment, key);
    }
    uint32_t set = kva_set_with(flat->sets, KVA_EMPTY_SET, worker);
    if (set == KVA_NO_SET)
        return 0;
    kva_set_hold(flat->sets, set);
    *slot = (kva_slot){key, set, stamp};
    segment->count++;
    flat->count++;
    return 1;
}

/* Empty a slot and move later ones of its cluster back, so that no mark is left for searches to step over. */
static void erase(kva_segment *segment, uint32_t hole)
{
    uint32_t capacity = segment->capacity, at = hole;
    for (;;) {
        at = at + 1 == capacity ? 0 : at + 1;
        kva_slot *slot = &segment->slots[at];
        if (slot->set == KVA_EMPTY_SET)
            break;
        uint32_t home = kva_home(segment, slot->key);
        /* It may move when its home does not lie in (hole, at], read around the end. */
        uint32_t from_home = at >= home ? at - home : at + capacity - home;
        uint32_t from_hole = at >= hole ? at - hole : at + capacity - hole;
        if (from_home >= from_hole) {
            segment->slots[hole] = *slot;
            hole = at;
        }
    }
    segment->slots[hole].set = KVA_EMPTY_SET;
}

void kva_flat_drop(kva_flat *flat, kva_slot *slot)
{
    kva_segment *segment = kva_segment_of(flat, slot->key);
    kva_set_release(flat->sets, slot->set);
    erase(segment, (uint32_t)(slot - segment->slots));
    segment->count--;
    flat->count--;
    if (segment->count < segment->capacity / 4 && segment->capacity > 2 * FIRST_SLOTS)
        resize(flat, segment, segment->capacity / 2); /* without memory it stays as it is */
}

int kva_flat_discard(kva_flat *flat, uint64_t key, uint32_t worker)
{
    kva_slot *slot = kva_flat_slot(flat, key);
    if (!slot)
        return 1;
    uint32_t set = kva_set_without(flat->sets, slot->set, worker);
    if (set == KVA_NO_SET)
        return 0;
    if (set == KVA_EMPTY_SET)
        kva_flat_drop(flat, slot);
    else if (set != slot->set)
        name_set(flat, slot, set);
    return 1;
}

void kva_flat_free(kva_flat *flat)
{
    for (uint32_t i = 0; i < KVA_SEGMENTS; i++) {
        kva_segment *segment = &flat->segments[i];
        kva_give_back(flat->sets->budget, segment->slots);
        memset(segment, 0, sizeof *segment);
    }
    flat->count = 0;
}
