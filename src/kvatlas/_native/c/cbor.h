/* Canonical CBOR (RFC 8949 section 4.2) of what a hashed block consists of: each integer in its shortest form. */
#ifndef KVA_CBOR_H
#define KVA_CBOR_H

#include "bytes.h"

#include <stddef.h>

enum {
    KVA_CBOR_UINT = 0 << 5,
    KVA_CBOR_BYTES = 2 << 5,
    KVA_CBOR_ARRAY = 4 << 5,
    KVA_CBOR_NULL = 0xf6,
    KVA_CBOR_HEAD_MAX = 9,
    /* An integer may be written with an 8-byte store that reaches past its end: buffers leave this much room. */
    KVA_CBOR_SLACK = 8
};

/* Write an item's head: major type and argument. Returns where the next byte goes.

   Below 2^32 there is no branch. Token ids of one prompt take 3 or 5 bytes as if at random, and a mispredicted branch
   for each would cost as much as hashing them: so the head and up to four argument bytes are put together in a register,
   stored as eight, and only the position moves by what counts. */
static inline uint8_t *kva_cbor_head(uint8_t *out, unsigned major, uint64_t value)
{
    if (value >> 32) {
        *out = (uint8_t)(major | 27);
        kva_store64be(out + 1, value);
        return out + 9;
    }
    unsigned one = value > 23, two = value > 0xff, four = value > 0xffff;
    unsigned argument_bytes = one + two + 2 * four;
    uint64_t first = one ? 23 + one + two + four : value;
    uint64_t argument = (uint64_t)kva_swap32((uint32_t)value) >> (32 - 8 * argument_bytes);
    kva_store64le(out, (first | major) | argument << 8);
    return out + 1 + argument_bytes;
}

static inline uint8_t *kva_cbor_uints(uint8_t *out, const uint64_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out = kva_cbor_head(out, KVA_CBOR_UINT, values[i]);
    return out;
}

#endif
