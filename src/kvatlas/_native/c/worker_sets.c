#include "worker_sets.h"

#include "mix.h"

#include <string.h>

enum { FIRST_SETS = 64, FIRST_BUCKETS = 128 };

static uint64_t own_word(const kva_sets *sets, uint32_t worker)
{
    return kva_mix(sets->seed + worker);
}

int kva_sets_init(kva_sets *sets, kva_budget *budget, uint64_t seed)
{
    memset(sets, 0, sizeof *sets);
    sets->budget = budget;
    sets->seed = seed;
    sets->capacity = FIRST_SETS;
    sets->bucket_count = FIRST_BUCKETS;
    sets->sets = kva_take(budget, sizeof(kva_set) * FIRST_SETS);
    sets->buckets = kva_take(budget, sizeof(uint32_t) * FIRST_BUCKETS);
    sets->steps = kva_take(budget, sizeof(kva_set_step) * KVA_SET_STEPS);
    sets->count = 1; /* number 0 is the empty set: no words, no members */
    if (sets->sets && sets->buckets && sets->steps)
        return 1;
    kva_sets_free(sets);
    return 0;
}

void kva_sets_free(kva_sets *sets)
{
    for (uint32_t i = 1; sets->sets && i < sets->count; i++)
        if (sets->sets[i].length > 1)
            kva_give_back(sets->budget, sets->sets[i].bits.words);
    kva_give_back(sets->budget, sets->sets);
    kva_give_back(sets->budget, sets->buckets);
    kva_give_back(sets->budget, sets->steps);
    sets->sets = NULL;
    sets->buckets = NULL;
    sets->steps = NULL;
}

static uint32_t *bucket_of(const kva_sets *sets, uint64_t hash)
{
    return &sets->buckets[hash & (sets->bucket_count - 1)];
}

static void grow_buckets(kva_sets *sets)
{
    uint32_t doubled = sets->bucket_count * 2;
    uint32_t *buckets = kva_take(sets->budget, sizeof(uint32_t) * doubled);
    if (!buckets)
        return; /* longer buckets are only slower */
    kva_give_back(sets->budget, sets->buckets);
    sets->buckets = buckets;
    sets->bucket_count = doubled;
    for (uint32_t i = 1; i < sets->count; i++) {
        if (!sets->sets[i].length)
            continue;
        uint32_t *bucket = bucket_of(sets, sets->sets[i].hash);
        sets->sets[i].next = *bucket;
        *bucket = i;
    }
}

/* A number for a new set; 0 when there is no memory. */
static uint32_t new_number(kva_sets *sets)
{
    if (sets->free) {
        uint32_t number = sets->free;
        sets->free = sets->sets[number].next;
        return number;
    }
    if (sets->count == sets->capacity) {
        uint32_t capacity = sets->capacity + sets->capacity / 2;
        kva_set *larger = kva_take(sets->budget, sizeof(kva_set) * capacity);
        if (!larger)
            return 0;
        memcpy(larger, sets->sets, sizeof(kva_set) * sets->count);
        kva_give_back(sets->budget, sets->sets);
        sets->sets = larger;
        sets->capacity = capacity;
    }
    return sets->count++;
}

static int is_same(const kva_set *set, uint64_t hash, const uint64_t *words, uint32_t first, uint32_t length)
{
    return set->hash == hash && set->first == first && set->length == length &&
           !memcmp(kva_set_words(set), words, sizeof(uint64_t) * length);
}

/* The number of the set of these words, of which the outer ones are not zero. */
static uint32_t intern(kva_sets *sets, uint64_t hash, const uint64_t *words, uint32_t first, uint32_t length)
{
    for (uint32_t i = *bucket_of(sets, hash); i; i = sets->sets[i].next)
        if (is_same(&sets->sets[i], hash, words, first, length))
            return i;
    uint64_t *stored = NULL;
    if (length > 1 && !(stored = kva_take(sets->budget, sizeof(uint64_t) * length)))
        return KVA_NO_SET;
    uint32_t number = new_number(sets);
    if (!number) {
        kva_give_back(sets->budget, stored);
        return KVA_NO_SET;
    }
    if (sets->live++ >= sets->bucket_count)
        grow_buckets(sets);
    kva_set *set = &sets->sets[number];
    set->hash = hash;
    set->first = (uint16_t)first;
    set->length = (uint16_t)length;
    set->refs = 0;
    set->generation++;
    if (stored) {
        memcpy(stored, words, sizeof(uint64_t) * length);
        set->bits.words = stored;
    } else
        set->bits.word = words[0];
    uint32_t *bucket = bucket_of(sets, hash);
    set->next = *bucket;
    *bucket = number;
    return number;
}

void kva_set_drop(kva_sets *sets, uint32_t number)
{
    kva_set *set = &sets->sets[number];
    uint32_t *link = bucket_of(sets, set->hash);
    while (*link != number)
        link = &sets->sets[*link].next;
    *link = set->next;
    if (set->length > 1)
        kva_give_back(sets->budget, set->bits.words);
    set->length = 0;
    set->generation++;
    set->next = sets->free;
    sets->free = number;
    sets->live--;
}

/* The neighbour of a set: one bit flipped. */
static uint32_t flipped(kva_sets *sets, uint32_t from, uint32_t worker)
{
    const kva_set *set = &sets->sets[from];
    uint64_t words[KVA_WORKER_WORDS];
    uint32_t at = worker / 64, first = at, end = at + 1;
    if (set->length) {
        first = set->first < at ? set->first : at;
        end = set->first + set->length > end ? (uint32_t)set->first + set->length : end;
    }
    for (uint32_t i = first; i < end; i++)
        words[i - first] = kva_set_word(set, i);
    words[at - first] ^= (uint64_t)1 << (worker % 64);
    uint32_t skip = 0, length = end - first;
    while (skip < length && !words[skip])
        skip++;
    while (length > skip && !words[length - 1])
        length--;
    if (skip == length)
        return KVA_EMPTY_SET;
    return intern(sets, set->hash ^ own_word(sets, worker), words + skip, first + skip, length - skip);
}

uint32_t kva_set_find_step(kva_sets *sets, uint32_t from, uint32_t step)
{
    uint32_t worker = step >> 1;
    if (kva_set_has(sets, from, worker) == (int)(step & 1))
        return from;
    uint32_t to = flipped(sets, from, worker);
    if (to != KVA_NO_SET)
        *kva_set_step_of(sets, from, step) =
            (kva_set_step){from, to, sets->sets[from].generation, sets->sets[to].generation, step};
    return to;
}
