#include "zmtp.h"

#include "bytes.h"

enum { MORE = 1, LONG = 2, COMMAND = 4, NUMBER_BYTES = 8 };

static kva_zmtp_kind end_message(kva_zmtp *zmtp, const uint8_t *data, size_t length)
{
    kva_zmtp_kind kind = zmtp->state == KVA_ZMTP_NUMBER ? KVA_ZMTP_BATCH : KVA_ZMTP_NO_BATCH;
    zmtp->state = KVA_ZMTP_BETWEEN;
    zmtp->data = data;
    zmtp->length = length;
    return kind;
}

kva_zmtp_kind kva_zmtp_next(kva_zmtp *zmtp, const uint8_t *bytes, size_t count, size_t most_bytes, size_t *at)
{
    for (;;) {
        const uint8_t *frame = bytes + *at;
        size_t left = count - *at, head = left && frame[0] & LONG ? 9 : 2;
        zmtp->length = head;
        if (left && (frame[0] > (MORE | LONG | COMMAND) || (frame[0] & COMMAND && frame[0] & MORE)))
            return KVA_ZMTP_BROKEN;
        if (left < head)
            return KVA_ZMTP_WANTS_MORE;
        uint64_t size = frame[0] & LONG ? kva_load64be(frame + 1) : frame[1];
        if (size > most_bytes || size > SIZE_MAX / 2) /* no frame takes 2^63 bytes, and the sum below is right */
            return KVA_ZMTP_BROKEN;
        zmtp->length = head + (size_t)size;
        if (left - head < size)
            return KVA_ZMTP_WANTS_MORE;
        *at += head + (size_t)size;
        const uint8_t *data = frame + head;
        if (frame[0] & COMMAND) {
            zmtp->data = data;
            zmtp->length = (size_t)size;
            return KVA_ZMTP_COMMAND;
        }
        if (!(frame[0] & MORE))
            return end_message(zmtp, data, (size_t)size);
        zmtp->state = size == NUMBER_BYTES ? KVA_ZMTP_NUMBER : KVA_ZMTP_NO_NUMBER;
        if (size == NUMBER_BYTES)
            zmtp->number = kva_load64be(data);
    }
}
