#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define KVA_HAVE_MMAP 1
#endif

enum { PAGE = 4096, CHUNK_PAGES = 64, CHUNK = PAGE * CHUNK_PAGES, CUT = CHUNK / 4, SMALL = PAGE * 3 / 4, ALIGN = 16 };

enum { FROM_HEAP = -1, FROM_SYSTEM = -2 };

/* In front of each piece. */
typedef struct {
    size_t cost;
    ptrdiff_t chunk; /* its number, or where else it came from */
} header;

_Static_assert(sizeof(header) == ALIGN, "pieces stay aligned behind their header");

static size_t rounded(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Tables are filled at random, so all of a piece is touched soon: the system may as well provide it at once. */
#ifdef MAP_POPULATE
#define KVA_MAP_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)
#else
#define KVA_MAP_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS)
#endif

static void *map(size_t bytes)
{
#ifdef KVA_HAVE_MMAP
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, KVA_MAP_FLAGS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
#else
    return calloc(1, bytes);
#endif
}

static void unmap(void *memory, size_t bytes)
{
#ifdef KVA_HAVE_MMAP
    munmap(memory, bytes);
#else
    (void)bytes;
    free(memory);
#endif
}

/* Count `bytes` more, if the cap allows it. */
static int hold(kva_budget *budget, size_t bytes)
{
    if (budget->cap && (bytes > budget->cap || budget->used > budget->cap - bytes)) {
        budget->refused++;
        return 0;
    }
    budget->used += bytes;
    return 1;
}

static header *mapped(kva_budget *budget, size_t bytes)
{
    if (!hold(budget, bytes))
        return NULL;
    header *piece = map(bytes);
    if (piece)
        *piece = (header){bytes, FROM_SYSTEM};
    else
        budget->used -= bytes;
    return piece;
}

static header *from_heap(kva_budget *budget, size_t whole)
{
    size_t cost = rounded(whole, ALIGN) + ALIGN; /* the heap's own header */
    if (!hold(budget, cost))
        return NULL;
    header *piece = calloc(1, whole);
    if (piece)
        *piece = (header){cost, FROM_HEAP};
    else
        budget->used -= cost;
    return piece;
}

static uint64_t run_of(unsigned pages)
{
    return pages == CHUNK_PAGES ? ~(uint64_t)0 : ((uint64_t)1 << pages) - 1;
}

/* The first of `pages` free pages in a row; CHUNK_PAGES when there are none. */
static unsigned first_fit(uint64_t taken, unsigned pages)
{
    uint64_t starts = ~taken; /* where a run of `have` free pages begins */
    for (unsigned have = 1; have < pages && starts;) {
        unsigned more = pages - have < have ? pages - have : have;
        starts &= starts >> more;
        have += more;
    }
    return starts ? (unsigned)__builtin_ctzll(starts) : CHUNK_PAGES;
}

/* A place in `chunks` for one more; its number, or -1. */
static ptrdiff_t new_chunk(kva_budget *budget)
{
    size_t number = 0;
    while (number < budget->chunk_count && budget->chunks[number].pages)
        number++;
    if (number == budget->chunk_count) {
        size_t count = budget->chunk_count ? budget->chunk_count * 2 : 16;
        kva_chunk *chunks = realloc(budget->chunks, sizeof *chunks * count);
        if (!chunks)
            return -1;
        memset(chunks + budget->chunk_count, 0, sizeof *chunks * (count - budget->chunk_count));
        budget->chunks = chunks;
        budget->chunk_count = count;
    }
    if (!hold(budget, CHUNK))
        return -1;
    budget->chunks[number] = (kva_chunk){map(CHUNK), 0};
    if (budget->chunks[number].pages)
        return (ptrdiff_t)number;
    budget->used -= CHUNK;
    return -1;
}

static header *from_chunk(kva_budget *budget, size_t bytes)
{
    unsigned pages = (unsigned)(bytes / PAGE), at = CHUNK_PAGES;
    size_t number = 0;
    for (; number < budget->chunk_count; number++)
        if (budget->chunks[number].pages && (at = first_fit(budget->chunks[number].taken, pages)) < CHUNK_PAGES)
            break;
    int is_new = number == budget->chunk_count;
    if (is_new) {
        ptrdiff_t added = new_chunk(budget);
        if (added < 0)
            return NULL;
        number = (size_t)added;
        at = 0;
    }
    kva_chunk *chunk = &budget->chunks[number];
    chunk->taken |= run_of(pages) << at;
    header *piece = (header *)(void *)(chunk->pages + (size_t)at * PAGE);
    if (!is_new)
        memset(piece, 0, bytes);
    *piece = (header){bytes, (ptrdiff_t)number};
    return piece;
}

void *kva_take(kva_budget *budget, size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t whole = bytes + sizeof(header), paged = rounded(whole, PAGE);
    header *piece = whole < SMALL    ? from_heap(budget, whole)
                    : paged <= CUT    ? from_chunk(budget, paged)
                                     : mapped(budget, paged);
    if (!piece)
        return NULL;
    budget->live += piece->cost;
    return piece + 1;
}

void kva_give_back(kva_budget *budget, void *memory)
{
    if (!memory)
        return;
    header *piece = (header *)memory - 1;
    size_t cost = piece->cost;
    budget->live -= cost;
    if (piece->chunk == FROM_HEAP) {
        free(piece);
        budget->used -= cost;
    } else if (piece->chunk == FROM_SYSTEM) {
        unmap(piece, cost);
        budget->used -= cost;
    } else {
        kva_chunk *chunk = &budget->chunks[piece->chunk];
        chunk->taken &= ~(run_of((unsigned)(cost / PAGE)) << ((size_t)((char *)piece - chunk->pages) / PAGE));
        if (!chunk->taken) {
            unmap(chunk->pages, CHUNK);
            chunk->pages = NULL;
            budget->used -= CHUNK;
        }
    }
}

int kva_charge(kva_budget *budget, ptrdiff_t bytes)
{
    if (bytes > 0 && !hold(budget, (size_t)bytes))
        return 0;
    if (bytes < 0)
        budget->used -= (size_t)-bytes;
    budget->live += (size_t)bytes; /* wraps back for a negative number */
    return 1;
}

void kva_budget_free(kva_budget *budget)
{
    free(budget->chunks);
    budget->chunks = NULL;
    budget->chunk_count = 0;
}
