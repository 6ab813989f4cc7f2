#include "zmq_frames.h"

#include "bytes.h"

#define DONTWAIT 1 /* ZMQ_DONTWAIT of libzmq 4 */

void kva_zmq_open(kva_zmq_reader *reader, const kva_zmq *zmq)
{
    reader->zmq = zmq;
    zmq->msg_init(&reader->frames[0]);
    zmq->msg_init(&reader->frames[1]);
}

kva_zmq_kind kva_zmq_next(kva_zmq_reader *reader, void *socket)
{
    const kva_zmq *zmq = reader->zmq;
    size_t count = 0;
    kva_zmq_msg *last;
    do {
        last = &reader->frames[count % 2];
        /* Gives back what the frame held. The frames of a message come whole: only the first one can be missing. */
        if (zmq->msg_recv(last, socket, DONTWAIT) < 0) {
            reader->error = zmq->error();
            return KVA_ZMQ_FAILED;
        }
        count++;
    } while (zmq->msg_more(last));
    kva_zmq_msg *number = &reader->frames[count % 2];
    if (count < 2 || zmq->msg_size(number) != 8)
        return KVA_ZMQ_NO_BATCH;
    reader->number = kva_load64be(zmq->msg_data(number));
    reader->payload = zmq->msg_data(last);
    reader->length = zmq->msg_size(last);
    return KVA_ZMQ_BATCH;
}

void kva_zmq_close(kva_zmq_reader *reader)
{
    reader->zmq->msg_close(&reader->frames[0]);
    reader->zmq->msg_close(&reader->frames[1]);
}
