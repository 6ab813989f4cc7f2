/* Runs of token ids in MessagePack: integers of 0..2^63-1, each in one of its encodings, one behind the other.

   They are most of an event's bytes. Where the processor has byte shuffles, several are taken at a step: the length of
   an id is in its first byte, so that reading one by one costs two dependent loads for each. */
#ifndef KVA_ID_RUNS_H
#define KVA_ID_RUNS_H

#include <stddef.h>
#include <stdint.h>

/* A place within a run, so that both its parts can be read at the same time. */
typedef struct {
    const uint8_t *at; /* NULL: not known */
    uint64_t before;   /* ids in front of it */
} kva_ids_half;

/* Move *at over as many ids as follow, `count` at most, and return how many. Stops before what is no id or is cut off
   by `end`. Tells a place about halfway, unless `half` is NULL or the run too short to gain by it. */
uint64_t kva_ids_skip(const uint8_t **at, const uint8_t *end, uint64_t count, kva_ids_half *half);

/* Read `count` ids into words[count]. Only on a run that `kva_ids_skip` moved over: nothing is checked. Bytes between the run
   and `end` may be loaded, and do not matter. `half`: of this run, or with `at` NULL. */
void kva_ids_read(const uint8_t *at, const uint8_t *end, size_t count, kva_ids_half half, uint64_t *words);

/* The same without the shuffles. */
uint64_t kva_ids_skip_portable(const uint8_t **at, const uint8_t *end, uint64_t count);
void kva_ids_read_portable(const uint8_t *at, size_t count, uint64_t *words);

#endif
