/* FNV-1a, 64 bits: one multiplication for each byte. */
#ifndef KVA_FNV1A_H
#define KVA_FNV1A_H

#include <stddef.h>
#include <stdint.h>

#define KVA_FNV1A_BASIS 0xcbf29ce484222325u

static inline uint64_t kva_fnv1a_64(const uint8_t *data, size_t length, uint64_t hash)
{
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ data[i]) * 0x100000001b3u;
    return hash;
}

#endif
