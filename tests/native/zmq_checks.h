/* Checks of the reader of ZMQ messages for the kernels' driver. libzmq is a fake: its messages lie in memory of exactly
   their size, are freed when the next one is received or the message is closed, and every wrong use of a call is told:
   so a byte read too far or too late, and a message that is never closed, do not pass. */
#ifndef ZMQ_CHECKS_H
#define ZMQ_CHECKS_H

#include "zmq_frames.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAKE_FRAMES_MAX = 64, FAKE_AGAIN = 11, FAKE_TERMINATED = 156384765 };

static const uint32_t FAKE_OPEN = 0x6b76615a;

/* What the fake keeps in the room of a message. */
typedef struct {
    uint8_t *data;
    size_t size;
    uint32_t state;
    int more;
} fake_msg;

/* Stands for a socket: frames that wait, and what is to fail once they are read. */
typedef struct {
    size_t sizes[FAKE_FRAMES_MAX];
    const uint8_t *frames[FAKE_FRAMES_MAX];
    int more[FAKE_FRAMES_MAX];
    size_t count, next;
    int end; /* the error once no frame is left */
} fake_socket;

static int fake_open, fake_misused, fake_error;

static inline fake_msg *fake_of(const kva_zmq_msg *msg)
{
    fake_msg *fake = (fake_msg *)(uintptr_t)msg->room;
    if (fake->state != FAKE_OPEN)
        fake_misused++;
    return fake;
}

static inline int fake_init(kva_zmq_msg *msg)
{
    memset(msg->room, 0x5a, sizeof msg->room); /* all 64 bytes are libzmq's */
    *(fake_msg *)(void *)msg->room = (fake_msg){malloc(1), 0, FAKE_OPEN, 0};
    fake_open++;
    return 0;
}

static inline int fake_recv(kva_zmq_msg *msg, void *from, int flags)
{
    fake_socket *socket = from;
    fake_msg *fake = fake_of(msg);
    free(fake->data); /* as libzmq does, whether a frame comes or not */
    fake->data = NULL;
    fake->size = 0;
    fake->more = 0;
    if (flags != 1)
        fake_misused++; /* it would wait */
    if (socket->next == socket->count) {
        fake_error = socket->end;
        return -1;
    }
    size_t at = socket->next++;
    fake->size = socket->sizes[at];
    fake->more = socket->more[at];
    fake->data = malloc(fake->size ? fake->size : 1);
    if (!fake->data)
        abort();
    if (fake->size)
        memcpy(fake->data, socket->frames[at], fake->size);
    return (int)fake->size;
}

static inline int fake_more(const kva_zmq_msg *msg)
{
    return fake_of(msg)->more;
}

static inline void *fake_data(kva_zmq_msg *msg)
{
    return fake_of(msg)->data;
}

static inline size_t fake_size(const kva_zmq_msg *msg)
{
    return fake_of(msg)->size;
}

static inline int fake_close(kva_zmq_msg *msg)
{
    fake_msg *fake = fake_of(msg);
    free(fake->data);
    memset(fake, 0, sizeof *fake);
    fake_open--;
    return 0;
}

static inline int fake_errno(void)
{
    return fake_error;
}

static const kva_zmq FAKE_ZMQ = {fake_init, fake_recv, fake_more, fake_data, fake_size, fake_close, fake_errno};

static inline void fake_send(fake_socket *socket, const void *frame, size_t size, int more)
{
    if (socket->count == FAKE_FRAMES_MAX)
        abort();
    socket->frames[socket->count] = frame;
    socket->sizes[socket->count] = size;
    socket->more[socket->count++] = more;
}

static const uint8_t FAKE_NUMBER[9] = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xff};
static const char FAKE_PAYLOAD[] = "payload";

/* A message of that many frames, the last but one of `width` bytes. */
static inline void fake_send_message(fake_socket *socket, size_t frames, size_t width, size_t length)
{
    for (size_t at = 0; at + 2 < frames; at++)
        fake_send(socket, "8 bytes!", at % 2 ? 8 : 0, 1);
    if (frames > 1)
        fake_send(socket, FAKE_NUMBER, width, 1);
    fake_send(socket, FAKE_PAYLOAD, length, 0);
}

typedef void zmq_expect(int holds, const char *what);

static inline void expect_batch(kva_zmq_reader *reader, fake_socket *socket, size_t length, zmq_expect *expect)
{
    expect(kva_zmq_next(reader, socket) == KVA_ZMQ_BATCH, "a batch is told");
    expect(reader->number == UINT64_C(0x0123456789abcdef), "its number is read");
    expect(reader->length == length && (length == 0 || memcmp(reader->payload, FAKE_PAYLOAD, length) == 0),
           "its payload is read");
}

/* Every form of a message between two usual ones, which must be told whatever it is. */
static inline void check_zmq_forms(zmq_expect *expect)
{
    static const size_t lengths[] = {0, 1, 7, 8};
    for (size_t frames = 1; frames <= 5; frames++)
        for (size_t width = 0; width <= 9; width++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                fake_socket socket = {.end = FAKE_AGAIN};
                kva_zmq_reader reader;
                kva_zmq_open(&reader, &FAKE_ZMQ);
                fake_send_message(&socket, 3, 8, 3);
                fake_send_message(&socket, frames, width, lengths[l]);
                fake_send_message(&socket, 2, 8, 8);
                expect_batch(&reader, &socket, 3, expect);
                if (frames > 1 && width == 8)
                    expect_batch(&reader, &socket, lengths[l], expect);
                else
                    expect(kva_zmq_next(&reader, &socket) == KVA_ZMQ_NO_BATCH, "what is no batch is told so");
                expect_batch(&reader, &socket, 8, expect);
                expect(kva_zmq_next(&reader, &socket) == KVA_ZMQ_FAILED && reader.error == FAKE_AGAIN, "no more");
                kva_zmq_close(&reader);
                expect(fake_open == 0, "every message is closed");
            }
}

/* What ends the reading: nothing there at first, a batch later, and an error in the middle of a message. */
static inline void check_zmq_ends(zmq_expect *expect)
{
    fake_socket socket = {.end = FAKE_AGAIN};
    kva_zmq_reader reader;
    kva_zmq_open(&reader, &FAKE_ZMQ);
    for (int time = 0; time < 3; time++) {
        expect(kva_zmq_next(&reader, &socket) == KVA_ZMQ_FAILED && reader.error == FAKE_AGAIN, "nothing waits");
        fake_send_message(&socket, 3, 8, 7);
        expect_batch(&reader, &socket, 7, expect);
    }
    for (size_t frames = 1; frames <= 4; frames++) {
        for (size_t at = 0; at < frames; at++)
            fake_send(&socket, FAKE_NUMBER, 8, 1);
        socket.end = FAKE_TERMINATED;
        expect(kva_zmq_next(&reader, &socket) == KVA_ZMQ_FAILED && reader.error == FAKE_TERMINATED, "cut off");
    }
    kva_zmq_close(&reader);
    kva_zmq_open(&reader, &FAKE_ZMQ);
    kva_zmq_close(&reader);
    expect(fake_open == 0, "every message is closed, one never received too");
}

static inline void check_zmq(zmq_expect *expect)
{
    expect(sizeof(kva_zmq_msg) == 64, "a message has libzmq's room");
    check_zmq_forms(expect);
    check_zmq_ends(expect);
    expect(fake_misused == 0, "no call on a message that is not open, none that would wait");
}

#endif
