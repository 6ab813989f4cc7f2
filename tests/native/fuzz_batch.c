/* Feeds damaged batches to the scanner under the sanitizers: it may refuse or hand back what it likes, and must not read
   outside, nor say what cannot be. Usage: fuzz_batch [seconds] [seed]; a failure names the round, and the seed repeats it. */
#include "fuzz.h"

static uint64_t opened, taken, handed_back;

/* Bytes that mean much to a parser. */
static uint8_t telling_byte(maker *m)
{
    static const uint8_t bytes[] = {0x00, 0x7f, 0x80, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc4, 0xc6, 0xc7, 0xc9,
                                    0xca, 0xcb, 0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd3, 0xd4, 0xd8, 0xd9, 0xdb, 0xdc,
                                    0xdd, 0xde, 0xdf, 0xe0, 0xff};
    return make_random(m, 4) ? bytes[make_random(m, sizeof bytes)] : (uint8_t)make_random(m, 256);
}

static void damage(maker *m)
{
    size_t at = (size_t)make_random(m, m->length), other = (size_t)make_random(m, m->length);
    size_t span = 1 + (size_t)make_random(m, 40);
    size_t after = m->length - (at > other ? at : other);
    if (span > after)
        span = after;
    switch (make_random(m, 6)) {
    case 0: m->bytes[at] ^= (uint8_t)(1u << make_random(m, 8)); break;
    case 1: m->bytes[at] = telling_byte(m); break;
    case 2: memmove(m->bytes + at, m->bytes + other, span); break;
    case 3: /* take some bytes out */
        if (span < m->length - at) {
            memmove(m->bytes + at, m->bytes + at + span, m->length - at - span);
            m->length -= span;
        }
        break;
    case 4: /* put one in */
        if (m->length < MAKER_ROOM) {
            memmove(m->bytes + at + 1, m->bytes + at, m->length - at);
            m->bytes[at] = telling_byte(m);
            m->length++;
        }
        break;
    default: /* nest deeply, or cut */
        if (make_random(m, 4))
            memset(m->bytes + at, 0x91, span);
        else
            m->length = at + 1;
    }
}

static void look_at(const kva_batch *batch, const kva_event *event, size_t expected_start)
{
    static uint64_t words[MAKER_ROOM], others[MAKER_ROOM];
    require(event->start == expected_start && event->start < event->end, "events lie one behind the other");
    require(event->end <= batch->length, "an event lies in the payload");
    if (event->kind == KVA_EVENT_OTHER) {
        handed_back++;
        return;
    }
    taken++;
    const uint8_t *at = batch->payload + event->hashes_at;
    require(event->hashes_at + event->hash_count <= event->end, "hashes lie in the event");
    if (event->hashes_kind == KVA_HANDLE_INT)
        kva_read_numbers(at, event->hash_count, others);
    for (size_t i = 0; i < event->hash_count; i++) {
        kva_handle hash;
        at = kva_read_handle(at, &hash);
        require(at && hash.kind == event->hashes_kind, "hashes are of one kind");
        require(hash.kind != KVA_HANDLE_INT || hash.number == others[i], "both ways read one number");
        require(hash.kind != KVA_HANDLE_BYTES || (hash.bytes.length > 0 && hash.bytes.length <= KVA_MAX_HANDLE_BYTES),
                "a hash has a length that decode_batch accepts");
    }
    require(at <= batch->payload + event->end, "hashes end in the event");
    require(event->tokens_at + event->token_count <= event->end, "tokens lie in the event");
    kva_batch_tokens(batch, event, words);
    kva_read_tokens(batch->payload + event->tokens_at, event->token_count, others);
    require(memcmp(words, others, event->token_count * sizeof *words) == 0, "both ways read the same tokens");
    for (size_t i = 0; i < event->token_count; i++)
        require(!(words[i] >> 63), "a token is below 2^63");
}

static void scan(maker *m)
{
    uint8_t *payload = exact_copy(m->bytes, m->length);
    kva_batch batch;
    kva_event event;
    if (kva_batch_open(&batch, payload, m->length, 1000, (unsigned)make_random(m, 80))) {
        opened++;
        size_t start = batch.at, events = 0;
        for (; kva_batch_next(&batch, &event); events++, start = event.end)
            look_at(&batch, &event, start);
        require(events == batch.event_count, "there are as many events as were announced");
    }
    size_t offset = (size_t)make_random(m, m->length + 1);
    const uint8_t *one = payload + offset, *other = one;
    uint64_t count = make_random(m, 200), ids = kva_ids_skip(&one, payload + m->length, count, NULL);
    require(ids == kva_ids_skip_portable(&other, payload + m->length, count) && one == other, "both skip alike");
    free(payload);
}

int main(int argc, char **argv)
{
    static maker m;
    static made_event made[8];
    begin_rounds(&m, argc, argv);
    for (; is_time_left(); rounds++) {
        make_batch(&m, made, 1 + (size_t)make_random(&m, 8));
        for (uint64_t left = make_random(&m, 6); left > 0; left--)
            damage(&m);
        scan(&m);
    }
    printf("fuzz_batch: %llu payloads, %llu opened; %llu events taken, %llu handed back\n", (unsigned long long)rounds,
           (unsigned long long)opened, (unsigned long long)taken, (unsigned long long)handed_back);
    return 0;
}
