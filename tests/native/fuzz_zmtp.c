/* Feeds damaged ZMTP streams to the scanner in random pieces under the sanitizers: it may call them broken or tell what
   it likes, and must not read outside, nor say what cannot be, nor say something else of the same bytes in one piece.
   Usage: fuzz_zmtp [seconds] [seed]; a failure names the round, and the seed repeats it. */
#include "fuzz.h"
#include "zmtp_checks.h"

static uint64_t told, broken;

static void damage(maker *m)
{
    static const uint8_t bytes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x7f, 0x80, 0xff};
    size_t at = (size_t)make_random(m, m->length), span;
    switch (make_random(m, 4)) {
    case 0: m->bytes[at] = bytes[make_random(m, sizeof bytes)]; break;
    case 1: m->bytes[at] ^= (uint8_t)(1u << make_random(m, 8)); break;
    case 2: /* take some bytes out */
        span = 1 + (size_t)make_random(m, m->length - at);
        m->length -= span;
        memmove(m->bytes + at, m->bytes + at + span, m->length - at);
        break;
    default: m->length = at + 1;
    }
    if (m->length == 0)
        put(m, 0);
}

/* One outcome as a number that depends on all of it, and on what was told before. */
static uint64_t mixed(uint64_t before, const kva_zmtp *zmtp, kva_zmtp_kind kind)
{
    uint64_t sum = before * 31 + (uint64_t)kind;
    if (kind == KVA_ZMTP_BATCH)
        sum = sum * 31 + zmtp->number;
    if (kind == KVA_ZMTP_BATCH || kind == KVA_ZMTP_COMMAND)
        for (size_t i = 0; i < zmtp->length; i++)
            sum = sum * 31 + zmtp->data[i];
    return sum;
}

/* Reads all there is, at most `piece` bytes more at a time, or all at once for 0. Returns what was told, in one number. */
static uint64_t read_in_pieces(maker *m, size_t piece, size_t most_bytes)
{
    kva_zmtp zmtp = {.state = KVA_ZMTP_BETWEEN};
    uint64_t sum = 0;
    for (size_t start = 0, end = 0; end < m->length;) {
        size_t at = 0, before, step = piece ? 1 + (size_t)make_random(m, piece) : m->length;
        end = step < m->length - end ? end + step : m->length;
        uint8_t *bytes = exact_copy(m->bytes + start, end - start);
        kva_zmtp_kind kind;
        for (;;) {
            before = at;
            kind = kva_zmtp_next(&zmtp, bytes, end - start, most_bytes, &at);
            require(at >= before && at <= end - start, "the place is within the bytes and goes on");
            if (kind == KVA_ZMTP_WANTS_MORE || kind == KVA_ZMTP_BROKEN)
                break;
            require(at > before, "what is told has ended");
            require(kind == KVA_ZMTP_NO_BATCH || zmtp.length <= most_bytes, "what is told is within the bound");
            sum = mixed(sum, &zmtp, kind);
            told++;
        }
        require(kind == KVA_ZMTP_BROKEN || zmtp.length > end - start - at, "more is wanted than there is");
        require(kind == KVA_ZMTP_BROKEN || zmtp.length <= most_bytes + 9, "no more is wanted than the bound");
        start += at;
        free(bytes);
        if (kind == KVA_ZMTP_BROKEN) {
            broken++;
            return sum * 31 + start;
        }
    }
    return sum;
}

int main(int argc, char **argv)
{
    static maker m;
    static made_stream made;
    begin_rounds(&m, argc, argv);
    for (; is_time_left(); rounds++) {
        make_zmtp_stream(&m, &made, 1 + (size_t)make_random(&m, 12));
        for (uint64_t left = make_random(&m, 6); left > 0; left--)
            damage(&m);
        size_t most_bytes = make_random(&m, 4) ? MADE_MOST_BYTES : (size_t)make_random(&m, 300);
        uint64_t whole = read_in_pieces(&m, 0, most_bytes);
        require(read_in_pieces(&m, 1 + (size_t)make_random(&m, 100), most_bytes) == whole, "pieces tell the same");
    }
    printf("fuzz_zmtp: %llu streams, %llu readings broken off; %llu messages and commands told\n",
           (unsigned long long)rounds, (unsigned long long)broken, (unsigned long long)told);
    return 0;
}
