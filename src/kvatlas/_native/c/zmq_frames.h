/* Batches from a ZMQ socket, frame by frame, through the calls of the libzmq that pyzmq has loaded.

   No header of libzmq is needed and nothing is linked: whoever calls brings the functions. A message's room of 64 bytes
   is part of libzmq's interface since 4.1. */
#ifndef KVA_ZMQ_FRAMES_H
#define KVA_ZMQ_FRAMES_H

#include <stddef.h>
#include <stdint.h>

typedef union {
    unsigned char room[64];
    void *aligned;
} kva_zmq_msg;

/* Public functions of libzmq 4 of these names, in this order. */
typedef struct {
    int (*msg_init)(kva_zmq_msg *msg);
    int (*msg_recv)(kva_zmq_msg *msg, void *socket, int flags);
    int (*msg_more)(const kva_zmq_msg *msg);
    void *(*msg_data)(kva_zmq_msg *msg);
    size_t (*msg_size)(const kva_zmq_msg *msg);
    int (*msg_close)(kva_zmq_msg *msg);
    int (*error)(void);
} kva_zmq;

typedef enum { KVA_ZMQ_BATCH, KVA_ZMQ_NO_BATCH, KVA_ZMQ_FAILED } kva_zmq_kind;

/* The last two frames of a message: what comes before them is the topic, which may be missing. */
typedef struct {
    const kva_zmq *zmq;
    kva_zmq_msg frames[2];
    uint64_t number;
    const uint8_t *payload;
    size_t length;
    int error; /* of libzmq, when it failed: EAGAIN when no message waits */
} kva_zmq_reader;

void kva_zmq_open(kva_zmq_reader *reader, const kva_zmq *zmq);

/* Receive the next message without waiting. The payload is valid until the next call. */
kva_zmq_kind kva_zmq_next(kva_zmq_reader *reader, void *socket);

void kva_zmq_close(kva_zmq_reader *reader);

#endif
