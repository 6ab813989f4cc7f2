/* What the batch scanner makes of each payload on standard input (4 bytes of length, little-endian, then the payload), as one
   JSON line each, for the tests that hold it to `kvatlas.events.decode_batch`. Texts and byte hashes are in hex. */
#include "batch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static uint8_t *allocate(size_t bytes)
{
    uint8_t *memory = malloc(bytes ? bytes : 1);
    if (!memory)
        abort();
    return memory;
}

static void print_text(const char *name, kva_text text)
{
    printf(", \"%s\": ", name);
    if (!text.data) {
        printf("null");
        return;
    }
    putchar('"');
    for (size_t i = 0; i < text.length; i++)
        printf("%02x", text.data[i]);
    putchar('"');
}

static void print_handle(const char *name, kva_handle handle)
{
    if (handle.kind == KVA_HANDLE_BYTES)
        print_text(name, handle.bytes);
    else if (handle.kind == KVA_HANDLE_INT)
        printf(", \"%s\": %" PRIu64, name, handle.number);
    else
        printf(", \"%s\": null", name);
}

static void print_optional(const char *name, int has, uint64_t number)
{
    if (has)
        printf(", \"%s\": %" PRIu64, name, number);
    else
        printf(", \"%s\": null", name);
}

static void print_hashes(const kva_batch *batch, const kva_event *event)
{
    const uint8_t *at = batch->payload + event->hashes_at;
    printf(", \"hashes\": [");
    for (size_t i = 0; i < event->hash_count; i++) {
        kva_handle hash;
        at = kva_read_handle(at, &hash);
        printf(i ? ", {\"of\": 1" : "{\"of\": 1");
        print_handle("hash", hash);
        putchar('}');
    }
    putchar(']');
}

static void print_tokens(const kva_batch *batch, const kva_event *event)
{
    uint64_t *words = (uint64_t *)(void *)allocate(event->token_count * sizeof *words);
    kva_batch_tokens(batch, event, words);
    printf(", \"tokens\": [");
    for (size_t i = 0; i < event->token_count; i++)
        printf(i ? ", %" PRIu64 : "%" PRIu64, words[i]);
    putchar(']');
    free(words);
}

static void print_event(const kva_batch *batch, const kva_event *event)
{
    static const char *const kinds[] = {"other", "stored", "removed"};
    printf("{\"kind\": \"%s\", \"start\": %zu, \"end\": %zu", kinds[event->kind], event->start, event->end);
    if (event->kind != KVA_EVENT_OTHER) {
        print_hashes(batch, event);
        print_tokens(batch, event);
        print_handle("parent", event->parent);
        printf(", \"block_size\": %" PRIu64, event->block_size);
        print_text("medium", event->medium);
        print_optional("group", event->has_group, event->group);
        print_text("spec_kind", event->spec_kind);
        print_optional("window", event->has_window, event->window);
    }
    putchar('}');
}

static void dump(const uint8_t *payload, size_t length)
{
    kva_batch batch;
    kva_event event;
    if (!kva_batch_open(&batch, payload, length, 500000, 32)) {
        puts("null");
        return;
    }
    printf("{\"ts\": %.17g", batch.ts);
    print_optional("rank", batch.has_rank, (uint64_t)batch.rank);
    printf(", \"events\": [");
    while (kva_batch_next(&batch, &event)) {
        print_event(&batch, &event);
        if (batch.index < batch.event_count)
            printf(", ");
    }
    puts("]}");
}

int main(void)
{
    uint8_t prefix[4];
    while (fread(prefix, 1, 4, stdin) == 4) {
        size_t length = kva_load32le(prefix);
        uint8_t *payload = allocate(length);
        if (fread(payload, 1, length, stdin) != length)
            return 1;
        dump(payload, length);
        fflush(stdout);
        free(payload);
    }
    return 0;
}
