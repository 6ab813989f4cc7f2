/* Memory for tables, counted against a cap.

   Tables grow by moving, and a heap keeps the holes they leave: the process then holds more than any count of live tables
   says. So pieces of some size are cut from chunks that belong to one index, whole chunks are what counts, and a chunk
   without live pieces goes back to the system. Large pieces are mappings of their own. */
#ifndef KVA_MEMORY_H
#define KVA_MEMORY_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    char *pages;    /* NULL: not there */
    uint64_t taken; /* a bit for each of its 64 pages */
} kva_chunk;

typedef struct {
    size_t used;    /* bytes held: chunks, mappings, small pieces as the heap rounds them */
    size_t cap;     /* 0: none */
    size_t refused; /* requests that the cap refused */
    size_t live;    /* bytes of live pieces, each with its rounding: at most `used` */
    kva_chunk *chunks;
    size_t chunk_count;
} kva_budget;

/* Zeroed memory, or NULL when the cap or the system refuses. */
void *kva_take(kva_budget *budget, size_t bytes);

/* NULL is allowed. */
void kva_give_back(kva_budget *budget, void *memory);

/* Count memory that others hold for the index: `bytes` more, or fewer when negative. 0 when the cap refuses. */
int kva_charge(kva_budget *budget, ptrdiff_t bytes);

/* When no piece is live any more. */
void kva_budget_free(kva_budget *budget);

#endif
