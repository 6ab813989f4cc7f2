/* The time stamp at the head of an event batch, without reading the rest.

   Source: vLLM 0.32.0, distributed/kv_events.py: a batch is [ts, events, ...] with ts a float. */
#ifndef KVA_BATCH_TIME_H
#define KVA_BATCH_TIME_H

#include "bytes.h"

#include <math.h>

/* Seconds; -INFINITY when the bytes do not start as engines' batches do. */
static inline double kva_batch_time(const uint8_t *payload, size_t length)
{
    if (length < 10 || payload[0] < 0x92 || payload[0] > 0x9f || payload[1] != 0xcb)
        return -INFINITY;
    uint64_t bits = kva_load64be(payload + 2);
    double ts;
    memcpy(&ts, &bits, sizeof ts);
    return ts;
}

#endif
