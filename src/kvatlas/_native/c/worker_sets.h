/* Sets of workers, each stored once and named by a number.

   Blocks of one chain are held by few different sets, so the index stores a set's number per block, and a walk along a
   chain looks into a set only where the number changes. Adding or removing one worker leads from set to set; the last
   steps are remembered. A set lives while slots name it. */
#ifndef KVA_WORKER_SETS_H
#define KVA_WORKER_SETS_H

#include "memory.h"

#include <stdint.h>

enum { KVA_MAX_WORKERS = 4096, KVA_WORKER_WORDS = KVA_MAX_WORKERS / 64 };

#define KVA_EMPTY_SET 0u
#define KVA_NO_SET UINT32_MAX /* no memory for it */

typedef struct {
    uint64_t hash; /* the members' own random words, xor-ed: the hash of a neighbour is one xor away */
    union {
        uint64_t word;   /* the only word */
        uint64_t *words; /* when there are more */
    } bits;
    uint32_t refs, next; /* next in its bucket, or in the free list */
    uint32_t generation; /* grows when the number is given to another set */
    uint16_t first, length; /* words [first, first + length) of the full bit row are stored; the outer ones are set */
} kva_set;

typedef struct {
    uint32_t from, to, from_generation, to_generation;
    uint32_t step; /* worker, and whether it joins or leaves */
} kva_set_step;

enum { KVA_SET_STEPS = 1024 };

typedef struct {
    kva_budget *budget;
    uint64_t seed;
    kva_set *sets;
    uint32_t *buckets;
    uint32_t count, capacity, free; /* numbers given out; room; head of the free list, 0 none */
    uint32_t live, bucket_count;
    kva_set_step *steps;
} kva_sets;

/* 0 when there is no memory. */
int kva_sets_init(kva_sets *sets, kva_budget *budget, uint64_t seed);
void kva_sets_free(kva_sets *sets);

/* Where a step is remembered: `step` is twice the worker, and one more if it joins. */
static inline kva_set_step *kva_set_step_of(const kva_sets *sets, uint32_t from, uint32_t step)
{
    return &sets->steps[(from * 0x9E3779B1u ^ step * 0x85EBCA77u) >> 22];
}

/* A step that is not remembered, or no step at all. */
uint32_t kva_set_find_step(kva_sets *sets, uint32_t from, uint32_t step);

static inline uint32_t kva_set_after(kva_sets *sets, uint32_t from, uint32_t step)
{
    const kva_set_step *known = kva_set_step_of(sets, from, step);
    if (known->from == from && known->step == step && known->from_generation == sets->sets[from].generation &&
        known->to_generation == sets->sets[known->to].generation)
        return known->to;
    return kva_set_find_step(sets, from, step);
}

/* The set with or without one worker; not yet held. KVA_NO_SET when there is no memory. */
static inline uint32_t kva_set_with(kva_sets *sets, uint32_t set, uint32_t worker)
{
    return kva_set_after(sets, set, worker << 1 | 1);
}

static inline uint32_t kva_set_without(kva_sets *sets, uint32_t set, uint32_t worker)
{
    return kva_set_after(sets, set, worker << 1);
}

/* Nobody names the set any more. */
void kva_set_drop(kva_sets *sets, uint32_t set);

/* One slot more or less names the set. */
static inline void kva_set_hold(kva_sets *sets, uint32_t set)
{
    sets->sets[set].refs++;
}

static inline void kva_set_release(kva_sets *sets, uint32_t set)
{
    if (set != KVA_EMPTY_SET && --sets->sets[set].refs == 0)
        kva_set_drop(sets, set);
}

static inline const uint64_t *kva_set_words(const kva_set *set)
{
    return set->length > 1 ? set->bits.words : &set->bits.word;
}

/* Word `index` of the full bit row. */
static inline uint64_t kva_set_word(const kva_set *set, uint32_t index)
{
    return index - set->first < set->length ? kva_set_words(set)[index - set->first] : 0;
}

static inline int kva_set_has(const kva_sets *sets, uint32_t set, uint32_t worker)
{
    return (int)(kva_set_word(&sets->sets[set], worker / 64) >> (worker % 64) & 1);
}

#endif
