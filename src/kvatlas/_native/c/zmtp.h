/* Batches from the bytes of a ZMTP 3 connection: the frames of its traffic, after the handshake.

   A frame is a byte of flags (1: more frames of this message follow, 2: long, 4: a command), its size in one byte, or
   in eight bytes, big-endian, if long, and that many bytes. Commands may stand between the frames of a message.
   Source: RFC 23/ZMTP and 37/ZMTP of the ZeroMQ project. */
#ifndef KVA_ZMTP_H
#define KVA_ZMTP_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    KVA_ZMTP_WANTS_MORE, /* no frame is left whole; `length` is what the next one takes, as far as is known */
    KVA_ZMTP_BATCH,      /* `number`, and the payload in `data` and `length` */
    KVA_ZMTP_NO_BATCH,   /* a message of another form has ended */
    KVA_ZMTP_COMMAND,    /* its body in `data` and `length` */
    KVA_ZMTP_BROKEN      /* flags that do not exist, or a frame above the bound or of 2^63 bytes: the connection is of no use */
} kva_zmtp_kind;

/* How far a message has come when the bytes end: nothing of it yet, or a last frame that is a number or is none. */
typedef enum { KVA_ZMTP_BETWEEN, KVA_ZMTP_NO_NUMBER, KVA_ZMTP_NUMBER } kva_zmtp_state;

typedef struct {
    kva_zmtp_state state;
    uint64_t number;
    const uint8_t *data;
    size_t length;
} kva_zmtp;

/* Read on from `*at`, which moves to the end of the last whole frame. */
kva_zmtp_kind kva_zmtp_next(kva_zmtp *zmtp, const uint8_t *bytes, size_t count, size_t most_bytes, size_t *at);

#endif
