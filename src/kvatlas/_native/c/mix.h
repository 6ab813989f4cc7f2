/* Spreading 64-bit words, and mapping them to places in a table of any size. */
#ifndef KVA_MIX_H
#define KVA_MIX_H

#include <stdint.h>

/* splitmix64's finaliser: every input bit reaches every output bit. */
static inline uint64_t kva_mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* A spread 32-bit word as a place in 0..capacity-1. Larger words get later places. */
static inline uint32_t kva_place(uint32_t spread, uint32_t capacity)
{
    return (uint32_t)((uint64_t)spread * capacity >> 32);
}

#endif
