/* Applying a batch's events straight from its bytes.

   Only what an engine sends day by day is applied here: events of a profile (medium, group, kind, window) that Python has
   judged before, with a known parent and nothing but tokens in their content. Everything else is handed back, one event at
   a time, so that every rule about odd events stands once, in Python. */
#ifndef KVA_APPLY_H
#define KVA_APPLY_H

#include "batch.h"
#include "index.h"

typedef enum { KVA_ALL_APPLIED, KVA_NEEDS_HELP, KVA_SOMEBODY_WOKE } kva_applied;

typedef struct {
    uint64_t handle, key;
} kva_woken;

/* What one call leaves for its caller, and memory that calls share. */
typedef struct {
    kva_event event; /* KVA_NEEDS_HELP: the event that was not applied; the batch stands after it */
    kva_woken *woken; /* KVA_SOMEBODY_WOKE: blocks that were waited for, and their keys */
    size_t woken_count;
    uint64_t *words; /* private */
    size_t word_count;
} kva_applier;

/* Apply events from where the batch stands. An event there is no working memory for is handed back. */
kva_applied kva_apply(kva_index *index, kva_column *column, kva_batch *batch, kva_applier *applier);

/* Apply events of this profile to `plane` from now on. `medium` and `kind` NULL: the event has none. 0: too many
   profiles, or a text too long; such events are handed back as before. */
int kva_learn(kva_column *column, const char *medium, ptrdiff_t medium_length, int has_group, uint64_t group,
              const char *kind, ptrdiff_t kind_length, int has_window, uint64_t window, uint64_t block_size,
              uint32_t plane);
void kva_unlearn(kva_column *column);

void kva_applier_free(kva_applier *applier);

#endif
