/* Events of one engine batch, read where they lie.

   What is read is a strict subset of what `kvatlas.events.decode_batch` accepts, with the same meaning: the forms engines
   send day by day. Everything else is handed back by its place in the payload, for Python to decode alone. So nothing here
   reports an error, and no rule about odd events stands in two places. */
#ifndef KVA_BATCH_H
#define KVA_BATCH_H

#include "msgpack.h"

#include <stddef.h>
#include <stdint.h>

/* What an event may hold at most; `DecodeLimits` has the same defaults. */
enum { KVA_MAX_HASHES = 1000000, KVA_MAX_TOKENS = 8000000, KVA_MAX_HANDLE_BYTES = 256 };

typedef enum { KVA_HANDLE_NONE, KVA_HANDLE_INT, KVA_HANDLE_BYTES } kva_handle_kind;

/* An engine's hash of a block. A negative integer is its two's complement: -1 and 2^64 - 1 are the same number. */
typedef struct {
    kva_handle_kind kind;
    uint64_t number;
    kva_text bytes; /* 1..KVA_MAX_HANDLE_BYTES */
} kva_handle;

typedef enum { KVA_EVENT_OTHER, KVA_EVENT_STORED, KVA_EVENT_REMOVED } kva_event_kind;

/* Texts are ASCII and point into the payload; data is NULL where the event has nil or nothing. Of an event of kind
   OTHER only `start` and `end` are set, all else is 0. */
typedef struct {
    kva_event_kind kind;
    size_t start, end;            /* its bytes in the payload */
    size_t hashes_at, hash_count; /* offset of the first hash */
    kva_handle_kind hashes_kind;  /* all hashes are of one kind; NONE when there are none */
    size_t tokens_at, token_count;
    kva_handle parent;
    uint64_t block_size;
    kva_text medium;
    int has_group;
    uint64_t group;
    kva_text spec_kind;
    int has_window;
    uint64_t window;
    kva_ids_half half; /* private: of the tokens */
} kva_event;

typedef struct {
    const uint8_t *payload; /* has to stay where it is as long as the batch and its events are used */
    size_t length;
    double ts;
    int has_rank;
    int64_t rank;
    size_t event_count;
    /* The rest is private. */
    size_t at, index; /* where the next event begins, and its number */
    uint32_t run;     /* the first of `runs` that is not behind us */
    kva_mp_runs runs;
} kva_batch;

/* Open a payload: 1 when all of it is exactly one well-formed batch `[ts, [event, ...], rank?, ...]` of at most
   `max_events` events and with no container deeper than `max_depth` (the batch itself is 1 deep, an event 3). 0: let
   `decode_batch` decide. Reads each byte at most once, needs no memory. The length of the payload is the caller's to limit. */
int kva_batch_open(kva_batch *batch, const uint8_t *payload, size_t length, size_t max_events, unsigned max_depth);

/* The next event of an opened batch: 1, or 0 after the last. */
int kva_batch_next(kva_batch *batch, kva_event *event);

/* Read one hash of an event that is not OTHER. Returns the position after it. */
const uint8_t *kva_read_handle(const uint8_t *at, kva_handle *out);

/* Read the hashes of an event whose `hashes_kind` is INT. */
void kva_read_numbers(const uint8_t *at, size_t count, uint64_t *numbers);

/* Read the token ids of a STORED event, each in 0..2^63-1, into words[count]. Returns `count`. */
size_t kva_read_tokens(const uint8_t *at, size_t count, uint64_t *words);

/* The same, sooner: where the payload ends is known, so that the last ids too are read several at a step. */
void kva_batch_tokens(const kva_batch *batch, const kva_event *event, uint64_t *words);

#endif
