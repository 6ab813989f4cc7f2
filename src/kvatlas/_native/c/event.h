/* One event of a batch, in map or array form: the part of the scanner that knows the fields. For `batch.c` alone. */
#ifndef KVA_EVENT_H
#define KVA_EVENT_H

#include "batch.h"

/* Read the event at `at` into `event`, all 0 before. Returns where it ends; NULL for one that is left to Python, of which
   `event` may then hold a part. Keeps `batch->run`. */
const uint8_t *kva_read_event(kva_batch *batch, kva_event *event, const uint8_t *at);

#endif
