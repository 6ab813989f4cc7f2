#include "apply.h"

#include <stdlib.h>
#include <string.h>

enum { KEPT_WORDS = 1 << 17 }; /* working memory above it is given back after each event */

static int is_name(const kva_name *name, kva_text text)
{
    if (!text.data)
        return !name->given;
    return name->given && name->length == text.length && !memcmp(name->text, text.data, text.length);
}

static int is_place(const kva_profile *profile, const kva_event *event)
{
    return is_name(&profile->medium, event->medium) && profile->has_group == event->has_group &&
           profile->group == event->group;
}

static const kva_profile *profile_of(const kva_column *column, const kva_event *event)
{
    for (uint32_t i = 0; i < column->profile_count; i++) {
        const kva_profile *profile = &column->profiles[i];
        if (!is_place(profile, event))
            continue;
        if (event->kind == KVA_EVENT_REMOVED)
            return profile;
        if (is_name(&profile->kind, event->spec_kind) && profile->has_window == event->has_window &&
            profile->window == event->window && profile->block_size == event->block_size)
            return profile;
    }
    return NULL;
}

static int set_name(kva_name *name, const char *text, ptrdiff_t length)
{
    memset(name, 0, sizeof *name);
    if (!text)
        return 1;
    if (length > KVA_MAX_NAME)
        return 0;
    name->given = 1;
    name->length = (uint8_t)length;
    memcpy(name->text, text, (size_t)length);
    return 1;
}

int kva_learn(kva_column *column, const char *medium, ptrdiff_t medium_length, int has_group, uint64_t group,
              const char *kind, ptrdiff_t kind_length, int has_window, uint64_t window, uint64_t block_size,
              uint32_t plane)
{
    if (column->profile_count == KVA_MAX_PROFILES)
        return 0;
    kva_profile *profile = &column->profiles[column->profile_count];
    if (!set_name(&profile->medium, medium, medium_length) || !set_name(&profile->kind, kind, kind_length))
        return 0;
    profile->has_group = has_group;
    profile->group = has_group ? group : 0;
    profile->has_window = has_window;
    profile->window = has_window ? window : 0;
    profile->block_size = block_size;
    profile->plane = plane;
    column->profile_count++;
    return 1;
}

void kva_unlearn(kva_column *column)
{
    column->profile_count = 0;
}

static int reserve(kva_applier *applier, size_t words)
{
    if (words <= applier->word_count)
        return 1;
    uint64_t *larger = malloc(sizeof *larger * words);
    if (!larger)
        return 0;
    free(applier->words);
    applier->words = larger;
    applier->word_count = words;
    return 1;
}

void kva_applier_free(kva_applier *applier)
{
    free(applier->words);
    free(applier->woken);
    memset(applier, 0, sizeof *applier);
}

static uint64_t number_of(const kva_index *index, const kva_handle *handle)
{
    return handle->kind == KVA_HANDLE_BYTES ? kva_xxh3_64(&index->key, handle->bytes.data, handle->bytes.length)
                                            : handle->number;
}

static void read_numbers(const kva_index *index, const kva_batch *batch, const kva_event *event, uint64_t *numbers)
{
    const uint8_t *at = batch->payload + event->hashes_at;
    if (event->hashes_kind == KVA_HANDLE_INT) {
        kva_read_numbers(at, event->hash_count, numbers);
        return;
    }
    for (size_t i = 0; i < event->hash_count; i++) {
        kva_handle handle;
        at = kva_read_handle(at, &handle);
        numbers[i] = number_of(index, &handle);
    }
}

static int keep_woken(kva_applier *applier, const uint64_t *numbers, const uint64_t *keys, const uint32_t *positions,
                      size_t count)
{
    kva_woken *woken = realloc(applier->woken, sizeof *woken * (count + 1));
    if (!woken)
        return 0;
    for (size_t i = 0; i < count; i++)
        woken[i] = (kva_woken){numbers[positions[i]], keys[positions[i]]};
    applier->woken = woken;
    applier->woken_count = count;
    return 1;
}

static kva_applied store(kva_index *index, kva_column *column, uint32_t plane, const kva_batch *batch,
                         const kva_event *event, kva_applier *applier)
{
    size_t blocks = event->hash_count;
    /* Whether hash i surely covers tokens [i * block_size, (i + 1) * block_size). */
    int is_paired = event->block_size > 0 && event->token_count / event->block_size == blocks &&
                    event->token_count % event->block_size == 0;
    if (!reserve(applier, event->token_count + 3 * blocks + 1))
        return KVA_NEEDS_HELP;
    uint64_t *numbers = applier->words, *keys = numbers + blocks, *token_ids = keys + blocks;
    uint32_t *positions = (uint32_t *)(token_ids + event->token_count);
    read_numbers(index, batch, event, numbers);
    kva_column_prefetch(column, numbers, blocks); /* comes while the tokens are read and hashed */
    uint64_t key = column->root_key;
    if (is_paired && blocks && event->parent.kind != KVA_HANDLE_NONE &&
        !kva_column_key(column, number_of(index, &event->parent), &key))
        return KVA_NEEDS_HELP;
    if (!is_paired) {
        kva_column_add_copies(index, column, plane, numbers, blocks);
        column->counts.unpaired += blocks;
        return KVA_ALL_APPLIED;
    }
    kva_batch_tokens(batch, event, token_ids);
    kva_tokens tokens = {token_ids, event->token_count, KVA_U64};
    if (kva_block_keys(&index->key, &tokens, event->block_size, key, NULL, keys) != KVA_OK)
        return KVA_NEEDS_HELP;
    size_t woken = kva_column_store(index, column, plane, numbers, keys, blocks, positions);
    if (!woken)
        return KVA_ALL_APPLIED;
    /* Without memory to tell who may be joined now, they wait on, until their pool gives them up. */
    return keep_woken(applier, numbers, keys, positions, woken) ? KVA_SOMEBODY_WOKE : KVA_ALL_APPLIED;
}

static kva_applied apply_one(kva_index *index, kva_column *column, const kva_batch *batch, const kva_event *event,
                             kva_applier *applier)
{
    const kva_profile *profile = event->kind == KVA_EVENT_OTHER ? NULL : profile_of(column, event);
    if (!profile)
        return KVA_NEEDS_HELP;
    if (event->kind == KVA_EVENT_STORED)
        return store(index, column, profile->plane, batch, event, applier);
    if (!reserve(applier, event->hash_count + 1))
        return KVA_NEEDS_HELP;
    read_numbers(index, batch, event, applier->words);
    kva_column_remove(index, column, profile->plane, applier->words, event->hash_count);
    return KVA_ALL_APPLIED;
}

kva_applied kva_apply(kva_index *index, kva_column *column, kva_batch *batch, kva_applier *applier)
{
    kva_applied outcome = KVA_ALL_APPLIED;
    while (outcome == KVA_ALL_APPLIED && kva_batch_next(batch, &applier->event))
        outcome = apply_one(index, column, batch, &applier->event, applier);
    if (applier->word_count > KEPT_WORDS) {
        free(applier->words);
        applier->words = NULL;
        applier->word_count = 0;
    }
    return outcome;
}
