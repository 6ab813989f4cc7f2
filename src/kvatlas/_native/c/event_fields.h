/* The fields of events and their order on the wire. For `batch.c` alone.

   Source: kvatlas.events.model, which has them from the engines. */
#ifndef KVA_EVENT_FIELDS_H
#define KVA_EVENT_FIELDS_H

#include "batch.h"

/* The fields of all events. Locality, ownership and session are checked and not kept: an index has no use for them. */
typedef enum {
    HASHES,
    PARENT,
    TOKENS,
    BLOCK_SIZE,
    LORA_ID,
    MEDIUM,
    LORA_NAME,
    EXTRA_KEYS,
    GROUP,
    SPEC_KIND,
    WINDOW,
    LOCALITY,
    OWNERSHIP,
    SESSION_ID,
    CACHE_SALT
} field;

typedef struct {
    const char *name;
    size_t length;
    field field;
} named_field;

#define NAMED(name, field) {name, sizeof name - 1, field}

/* In the order of the wire, which is also that of the older array form. */
static const named_field stored_fields[] = {
    NAMED("block_hashes", HASHES),
    NAMED("parent_block_hash", PARENT),
    NAMED("token_ids", TOKENS),
    NAMED("block_size", BLOCK_SIZE),
    NAMED("lora_id", LORA_ID),
    NAMED("medium", MEDIUM),
    NAMED("lora_name", LORA_NAME),
    NAMED("extra_keys", EXTRA_KEYS),
    NAMED("group_idx", GROUP),
    NAMED("kv_cache_spec_kind", SPEC_KIND),
    NAMED("kv_cache_spec_sliding_window", WINDOW),
    NAMED("locality", LOCALITY),
    NAMED("ownership", OWNERSHIP),
    NAMED("session_id", SESSION_ID),
    NAMED("cache_salt", CACHE_SALT),
};
static const named_field removed_fields[] = {
    NAMED("block_hashes", HASHES), NAMED("medium", MEDIUM),       NAMED("group_idx", GROUP),
    NAMED("locality", LOCALITY),   NAMED("ownership", OWNERSHIP),
};

typedef struct {
    kva_event_kind kind;
    const named_field *fields;
    size_t count;
    uint32_t required; /* one bit a field */
} event_schema;

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const event_schema stored_schema = {KVA_EVENT_STORED, stored_fields, COUNT(stored_fields),
                                           1u << HASHES | 1u << PARENT | 1u << TOKENS | 1u << BLOCK_SIZE};
static const event_schema removed_schema = {KVA_EVENT_REMOVED, removed_fields, COUNT(removed_fields), 1u << HASHES};

#undef NAMED
#undef COUNT

#endif
