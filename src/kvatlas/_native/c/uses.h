/* When requests last used one worker's blocks, by that worker's own clock: a model of its free queue.

   An engine puts the blocks of a request at the tail of its free queue when the request ends, and takes new ones from
   the head. The clock counts what does both: blocks that the worker stored, and blocks that its requests used. A time
   for each block and worker would cost more memory than there is, and blocks that one request computed are of one age
   until another request uses some of them. So two blocks of each request have a time: the first that it computed and
   the last one of its prompt. Any block is as old as the nearest of those up its chain.

   Open addressing over 8-byte cells. A block goes by 32 bits of its key, which are random; among some thousand cells
   two of which agree by chance once in a million look-ups. */
#ifndef KVA_USES_H
#define KVA_USES_H

#include "memory.h"

typedef struct {
    uint32_t print, time; /* print 0: an empty cell */
} kva_use;

typedef struct {
    kva_use *cells;
    uint32_t capacity, count;
} kva_uses;

enum { KVA_USE_BINS = 240, KVA_LEAST_USES = 1024, KVA_BLOCKS_PER_USE = 8 };

/* An age as one byte: exact below 8, then eight steps to each power of two. Never falls as ages rise. */
static inline uint32_t kva_age_code(uint32_t age)
{
    if (age < 8)
        return age;
    uint32_t top = 31 - (uint32_t)__builtin_clz(age);
    return 8 * (top - 2) + (age >> (top - 3) & 7);
}

/* The least age of a code below KVA_USE_BINS. */
static inline uint32_t kva_age_of_code(uint32_t code)
{
    return code < 16 ? code : (8 + code % 8) << (code / 8 - 1);
}

static inline uint32_t kva_print(uint64_t key)
{
    uint32_t print = (uint32_t)key;
    return print ? print : 1;
}

/* The time of a block, or NULL. Cells move with the next put or drop. */
uint32_t *kva_uses_find(const kva_uses *uses, uint32_t print);

/* Note a time. With `most` cells in use already the older half goes first. `now` is the clock. 0 when there is no
   memory: then nothing is noted. */
int kva_uses_put(kva_uses *uses, kva_budget *budget, uint32_t print, uint32_t time, uint32_t now, size_t most);

/* Forget a block, which need not be there. */
void kva_uses_drop(kva_uses *uses, uint32_t print);

void kva_uses_free(kva_uses *uses, kva_budget *budget);

#endif
