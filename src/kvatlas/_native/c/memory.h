/* Memory for tables, counted against a cap.

   Tables of 64 KiB and more come straight from the system and go straight back to it: a heap would keep the holes that
   growing tables leave behind, and the count would then say less than the process holds. */
#ifndef KVA_MEMORY_H
#define KVA_MEMORY_H

#include <stddef.h>

typedef struct {
    size_t used;    /* bytes taken, as the allocator rounds them */
    size_t cap;     /* 0: none */
    size_t refused; /* requests that the cap refused */
} kva_budget;

/* Zeroed memory, or NULL when the cap or the system refuses. */
void *kva_take(kva_budget *budget, size_t bytes);

/* `bytes` as asked for. NULL is allowed. */
void kva_give_back(kva_budget *budget, void *memory, size_t bytes);

#endif
